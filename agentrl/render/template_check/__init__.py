"""What a chat template does to the tokens that are trained on."""
