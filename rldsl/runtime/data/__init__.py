"""Data sources: rows of files, checked once when a run starts, read by number afterwards.

files: opening them; rows: what a row must hold; jsonl, parquet, hf (and arrow, what these two share): tables;
views: pairs of a row, rows that are kept; tokens: rows to token ids; lengths: rows with too many; order, source: the
batches of a run.
"""

from rldsl.runtime.data.row_schema import Row
from rldsl.runtime.data.source import FetchedFrame, Source, open_source
from rldsl.runtime.data.tokens import load_tokenizer

__all__ = ["FetchedFrame", "Row", "Source", "load_tokenizer", "open_source"]
