"""Shapes of records: which is the default, what a record of another is called, and which others were measured in."""

from .markdown import Record

DEFAULT_SHAPE = {"dtype": "bfloat16", "kv_cache_dtype": "auto", "layout": "packed", "head_size": 128, "block_size": 16}


def is_default(shape: Record) -> bool:
    """Whether a shape is the default one but for its layout."""
    return {**DEFAULT_SHAPE, "layout": shape["layout"]} == shape


def is_plain(shape: Record) -> bool:
    """Whether targets of 16-bit caches of the default sizes hold, and others were measured on such caches."""
    same = ("kv_cache_dtype", "head_size", "block_size")
    return shape["dtype"] != "float32" and all(shape[name] == DEFAULT_SHAPE[name] for name in same)


def shape_name(bench: str, shape: Record, layout: str) -> str:
    """The bench's name, and what sets the shape apart from the default one with ``layout``."""
    words = [bench] if shape["layout"] == layout else [bench, shape["layout"].lower()]
    names = ("dtype", "kv_cache_dtype")
    words += [shape[name] for name in names] if any(shape[name] != DEFAULT_SHAPE[name] for name in names) else []
    for name, letter in (("head_size", "h"), ("block_size", "b")):
        if shape[name] != DEFAULT_SHAPE[name]:
            words.append(f"{letter}{shape[name]}")
    return "-".join(words)
