"""Check of a chat template: its effect on the tokens that are trained on."""
