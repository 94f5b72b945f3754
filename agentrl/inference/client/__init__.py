"""The client of an engine that speaks the SGLang protocol."""
