"""Tasks from files of prompts: JSONL and parquet."""
