"""Fine-tuning of pruned models, `prunevit finetune`."""
