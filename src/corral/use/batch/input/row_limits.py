"""What one row may be: so many bytes, nested so deep. Beyond that it is a bad row like any other, told by its line.

An input may be made to do harm, or be no list of rows at all (a disk image, one line without an end): what is held of
it is never more than one row of this size.
"""

from __future__ import annotations

from typing import Any

import msgspec

from corral.base.errors import DataError
from corral.base.untrusted import deeper_than

LONGEST_ROW = 32 << 20  # bytes; a prompt of a million tokens has some 5 MB
DEEPEST_ROW = 256  # levels of lists and objects
TOO_LONG = f"is longer than {LONGEST_ROW >> 20} MiB"
TOO_DEEP = f"is nested more than {DEEPEST_ROW} levels deep"
_decode = msgspec.json.Decoder().decode


def decode_row(raw: bytes) -> Any:
    """The value of a row; DataError with the problem in words when it has none."""
    try:
        row = _decode(raw)
    except RecursionError:
        raise DataError(TOO_DEEP) from None
    except UnicodeDecodeError as error:
        raise DataError(f"is not UTF-8 (byte {error.start + 1})") from None
    except msgspec.DecodeError as error:
        raise DataError(f"is not valid JSON: {error}") from None
    if raw.count(b"[") + raw.count(b"{") > DEEPEST_ROW and deeper_than(row, DEEPEST_ROW):
        raise DataError(TOO_DEEP)
    return row
