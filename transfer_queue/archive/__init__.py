"""The archive: trained batches in Parquet files, one mechanism for resume, replay and questions."""
