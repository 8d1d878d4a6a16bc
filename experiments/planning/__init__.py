"""What pruning will cost, ahead of a run, and what the papers say that it costs and keeps."""
