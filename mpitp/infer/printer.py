"""What `mpitp generate` prints: texts as they come, texts when they are done, or JSON."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from mpitp.infer.lines import takes_every_letter, write_out

if TYPE_CHECKING:
    from mpitp.data.tokenizer import Tokenizer
    from mpitp.infer.generate import Completion


class Printer:
    """What rank 0 writes to stdout; other ranks write nothing."""

    def __init__(
        self,
        args: argparse.Namespace,
        tokenizer: Tokenizer,
        prompts: list[str],
        encoded: list[list[int]],
        *,
        is_speaker: bool,
    ) -> None:
        self.json, self.echo, self.tokenizer = args.json, not args.no_echo, tokenizer
        self.prompts, self.encoded = prompts, encoded
        self.is_speaker = is_speaker
        self.stream = tokenizer.stream_decoder(context=encoded[0]) if args.stream else None

    def begin(self) -> None:
        """The prompt, when the text is streamed behind it."""
        if self.stream is not None and self.echo:
            self._write(self.prompts[0])

    def token(self, index: int, token: int) -> None:
        """A new token: its whole characters are printed at once when streaming."""
        if self.stream is not None:
            self._write(self.stream.push(token))

    def end(self, completions: list[Completion]) -> None:
        """All that has not been printed yet."""
        if self.stream is not None:
            self._write(self.stream.flush() + "\n")
            return
        for index, (prompt, ids, done) in enumerate(zip(self.prompts, self.encoded, completions, strict=True)):
            text = self.tokenizer.decode_after(ids, done.tokens)
            if self.json:
                record = {"prompt": prompt, "text": text, "tokens": done.tokens, "finish_reason": done.finish_reason}
                self._write(json.dumps(record, ensure_ascii=not takes_every_letter(sys.stdout)) + "\n")
            else:
                self._write(("\n" if index else "") + (prompt if self.echo else "") + text + "\n")

    def _write(self, text: str) -> None:
        if self.is_speaker:
            write_out(text)
