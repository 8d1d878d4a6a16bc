"""Several pruned models beside each other: one pass over the images, statistics, and the report."""
