"""Tasks from prompts: JSONL and parquet files, Hugging Face datasets."""
