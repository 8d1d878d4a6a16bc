"""The benchmark, `prunevit bench`: speed on a GPU beside the strongest rivals."""
