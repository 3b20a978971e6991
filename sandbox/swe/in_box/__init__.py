"""What runs in a grading box. Sent there as text: it imports nothing of ours, and runs on any Python since 3.7."""
