"""The embedded engine: a torch model behind SGLang's HTTP endpoints, batched, with a KV cache kept between turns."""
