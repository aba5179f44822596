"""The model that a form (multipart/form-data) names: audio comes in forms.

The server reads the form anew with a parser of its own. So that both find the same model, a form that could be read
in two ways is refused: parts without one plain disposition, a character set, two different models.
"""

from __future__ import annotations

from collections.abc import Iterator

from python_multipart.multipart import parse_options_header

MOST_PARTS = 256
LARGEST_PART_HEAD_BYTES = 4096
_DISPOSITION = b"content-disposition"


class BadFormError(ValueError):
    """A form that cannot be read, or in more than one way."""


def is_form(content_type: bytes) -> bool:
    return content_type.partition(b";")[0].strip().lower() == b"multipart/form-data"


class FormReader:
    """Finds the model of a form while it arrives in `body`: a long form is not searched at once, nor twice."""

    __slots__ = ("_found", "_steps")

    def __init__(self, content_type: bytes, body: bytes | bytearray) -> None:
        self._found: str | BadFormError | None = BadFormError("a part of it does not end")
        self._steps: Iterator[None] | None = self._read(content_type, body)

    def advance(self) -> None:
        """The body has grown."""
        try:
            if self._steps is not None:
                next(self._steps)
        except StopIteration:
            self._steps = None
        except BadFormError as error:
            self._steps, self._found = None, error

    def model(self) -> str | None:
        """The value of the field `model` in the whole form; None where there is none."""
        self.advance()
        if isinstance(self._found, BadFormError):
            raise self._found
        return self._found

    def _read(self, content_type: bytes, body: bytes | bytearray) -> Iterator[None]:
        """Yields where more of the body is needed."""
        options = parse_options_header(content_type)[1]
        boundary = options.get(b"boundary", b"")
        if not boundary or options.get(b"charset", b"utf-8").lower() != b"utf-8":
            raise BadFormError("it has no boundary, or a character set")
        delimiter = b"\r\n--" + boundary
        at = len(delimiter) - 2
        while len(body) < at:
            yield
        if not body.startswith(delimiter[2:]):
            raise BadFormError("it does not begin with its boundary")
        models: set[bytes] = set()
        for _ in range(MOST_PARTS):
            while len(body) < at + 2:
                yield
            if body[at : at + 2] == b"--":
                self._found = _decoded(models)
                return
            while (head_end := body.find(b"\r\n\r\n", at, at + LARGEST_PART_HEAD_BYTES)) < 0:
                if len(body) >= at + LARGEST_PART_HEAD_BYTES:
                    raise BadFormError("the head of a part does not end")
                yield
            if not body.startswith(b"\r\n", at):
                raise BadFormError("its boundary does not end a line")
            searched = head_end
            while (end := body.find(delimiter, searched)) < 0:
                searched = max(searched, len(body) - len(delimiter) + 1)
                yield
            if _field(bytes(body[at + 2 : head_end])) == b"model":
                models.add(bytes(body[head_end + 4 : min(end, head_end + 4 + LARGEST_PART_HEAD_BYTES)]))
            at = end + len(delimiter)
        raise BadFormError(f"it has more than {MOST_PARTS} parts")


def _field(head: bytes) -> bytes:
    """The name of a part's field."""
    pairs = [line.partition(b":") for line in head.split(b"\r\n")]
    dispositions = [value for name, _, value in pairs if name.lower() == _DISPOSITION]
    if len(dispositions) != 1 or any(line[:1] in b" \t" for line in head.split(b"\r\n")):
        raise BadFormError("a part of it has not one disposition")
    kind, options = parse_options_header(dispositions[0])
    if kind != b"form-data" or b"name" not in options:
        raise BadFormError("a part of it has no name")
    return options[b"name"]


def _decoded(found: set[bytes]) -> str | None:
    if len(found) > 1:
        raise BadFormError("it names more than one model")
    try:
        return found.pop().decode() if found else None
    except UnicodeDecodeError:
        raise BadFormError("its model is not UTF-8") from None
