"""Server-sent events, split out of the bytes of a stream."""

from __future__ import annotations


class EventSplitter:
    """Splits server-sent events out of bytes that may be cut anywhere; gives the data of each."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    @property
    def empty(self) -> bool:
        return not self._rest

    def end(self) -> list[bytes]:
        """The last event, if only the line feed after its carriage return was missing; other rests are dropped."""
        found = self.feed(b"\n") if self._rest.endswith(b"\r") else []
        self._rest = b""
        return found

    def feed(self, data: bytes) -> list[bytes]:
        """The data of every event that is now complete."""
        text = self._rest + data
        if b"\r" in text:
            held = text.endswith(b"\r")  # its \n may still come
            text = text.replace(b"\r\n", b"\n")
            if held:
                text = text[:-1]
            text = text.replace(b"\r", b"\n")
        else:
            held = False
        *blocks, rest = text.split(b"\n\n")
        self._rest = rest + b"\r" if held else rest
        found = []
        for block in blocks:
            lines = [line[5:] for line in block.split(b"\n") if line.startswith(b"data:")]
            if lines:
                found.append(b"\n".join(line[1:] if line[:1] == b" " else line for line in lines))
        return found
