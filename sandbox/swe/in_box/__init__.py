"""Programs of a grading box. Sent there as text: they import nothing of Penstock and run on Python 3.7 or newer."""
