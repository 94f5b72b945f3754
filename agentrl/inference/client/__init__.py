"""Client of an engine that speaks the SGLang protocol: sampling, weight updates, memory, process groups."""
