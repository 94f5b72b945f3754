"""Supervised fine-tuning on scripted demonstrations."""
