"""The data of the system: ragged columns on Arrow (`Batch`), their metadata (`BatchRef`), and how rows are cut into parts."""

from rolemesh.batch.assembly import Assembly, assemble
from rolemesh.batch.balance import balance, token_chunks
from rolemesh.batch.batch import Batch
from rolemesh.batch.columns import COLUMNS, Column, Kind, columns_reference
from rolemesh.batch.layer import Block, Layer
from rolemesh.batch.ref import BatchRef, BlockMeta, block_meta
from rolemesh.batch.tensors import tensors

__all__ = [
    "COLUMNS",
    "Assembly",
    "Batch",
    "BatchRef",
    "Block",
    "BlockMeta",
    "Column",
    "Kind",
    "Layer",
    "assemble",
    "balance",
    "block_meta",
    "columns_reference",
    "tensors",
    "token_chunks",
]
