"""Data sources: rows of files, checked once when a run starts, read by number afterwards.

data_files: opening them; row_schema: what a row must have; row_errors: what is wrong with a row; row_check: what is
wrong with a file; jsonl, parquet, hf (and arrow, what these two share): tables of rows; row_views: the pairs of a row,
rows that are kept; tokens: rows to token ids; over_long_rows: rows with too many tokens; source: the batches of a run;
read_positions: how a source was read, for checkpoints; written_prompts: token ids of prompts that Python functions
write.
"""

from rldsl.runtime.data.row_schema import Row
from rldsl.runtime.data.source import FetchedFrame, Source, open_source
from rldsl.runtime.data.tokens import load_tokenizer

__all__ = ["FetchedFrame", "Row", "Source", "load_tokenizer", "open_source"]
