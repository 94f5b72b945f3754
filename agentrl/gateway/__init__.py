"""Endpoints of OpenAI and Anthropic in front of the policy, and agent programs that play episodes through them."""
