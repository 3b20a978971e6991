"""`penstock sft`: conversations of files, runs and policies, the process that trains on them, and its ranks."""
