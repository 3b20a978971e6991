"""A run in miniature, made of real processes, that may be broken anywhere, and the account of what became of it.

stage ──starts──► redis-server ◄──(proxy)── worker processes: lease, journal, complete
  │                    ▲                          │ told.jsonl: what was acknowledged
  │                    └──────── trainer process: lease_batch, publish, checkpoint, commit
  ├── havoc: kills, pauses, cuts, fills                │ checkpoints/: its lineage
  └── account: every submitted episode is in exactly one place ◄─┘
"""
