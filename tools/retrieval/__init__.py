"""A retrieval server: BM25 over a corpus of passages, in the shape that Search-R1's server has."""
