"""12  What breaks: a dozen bugs that people write in tensor-parallel code, to be found with `verify`.

    python examples/12_what_breaks.py               plant each bug in turn: does verify see it?
    python examples/12_what_breaks.py 7             plant number 7, and show what differs from one rank
    python examples/12_what_breaks.py 7 LAYER b     your answer: the layer, and what is wrong there
    python examples/12_what_breaks.py --answers     all of them

The table has a row for every array in the order of computation: `output` going forward, `gradient of the input` going
back, then the parameters. An error spreads to all that comes after it: look at the first row that differs.
"""

import re
import sys
import textwrap

from course import exercise, on_ranks, say
from planted_bugs import COURSE, FAULTS, choices, course_config

from mpitp.comm import Group
from mpitp.layers import Site, make_site
from mpitp.models import CausalLM, new_model
from mpitp.verify.batches import random_batch
from mpitp.verify.command import default_tolerance
from mpitp.verify.report import table
from mpitp.verify.run import Report, Settings, verify
from mpitp.verify.source import shake

RANKS = 2
USAGE = "usage: 12_what_breaks.py [--answers | NUMBER [LAYER LETTER]], NUMBER from 1 to 12, on 2 ranks or more"


def verified(group: Group, number: int) -> Report:
    """What `mpitp verify` says with the bug in place; complete on rank 0."""
    config = course_config(number)

    def make(site: Site) -> CausalLM:
        shake(model := new_model(config, site, seed=12), 12)  # norms and biases too get values of their own
        return model

    settings = Settings(default_tolerance("float64", is_exact=False))
    return verify(make_site(group, dtype="float64"), make, random_batch(config, batch=3, seq=7, seed=12), settings)


def show_count(group: Group, number: int) -> None:
    rows = group.broadcast_object(verified(group, number).rows)
    failed = sum(not row.ok for row in rows)
    say(group, f"{'PROOF ' if failed else 'WRONG '} bug {number:>2}: {failed:>3} of {len(rows)} comparisons differ")
    if not failed:
        sys.exit(USAGE)


def show_bug(group: Group, number: int, layer: str = "", letter: str = "") -> None:
    report = verified(group, number)
    if group.rank == 0:
        lines = [re.split(r"\s{2,}", line) for line in table(report, failures_only=True).splitlines()]
        print(f"Bug {number}, in a {course_config(number).model_type} model. What differs from one rank:\n")
        for name, what, _, _, relative, verdict in lines[:10]:
            print(f"{name:<28}{what:<24}{relative:>9}  {verdict.partition(' by ')[0]}")
        print(f"... and {len(lines) - 10} more rows\n" if len(lines) > 10 else "")
    offered = dict(zip("abc", choices(number), strict=True))
    say(group, "\n".join(f"  {key}  {mistake}" for key, mistake in offered.items()))
    fault = FAULTS[COURSE[number - 1]]
    if layer:
        place = any(layer in (name, name.rpartition(".")[0]) for name in fault.seen.values())
        what = offered.get(letter) == fault.mistake
        say(group, f"\nThe layer is {'right' if place else 'wrong'}, the mistake {'right' if what else 'wrong'}.")
    else:
        say(group, f"\nWhich layer, and which mistake?  python examples/12_what_breaks.py {number} LAYER a|b|c")


def show_answer(group: Group, number: int) -> None:
    fault = FAULTS[COURSE[number - 1]]
    say(group, f"{number:>2}  {', '.join(dict.fromkeys(fault.seen.values()))}{'  (types tell)' * fault.types}")
    say(group, textwrap.fill(fault.mistake, 80, initial_indent=" " * 4, subsequent_indent=" " * 4))


def end(group: Group) -> None:
    exercise(group, "Find them: python examples/12_what_breaks.py 1, then 2, ... to 12. Write the answers down first.")


def main(words: list[str]) -> None:
    numbers = range(1, len(COURSE) + 1)
    if words == ["--answers"]:
        for number in numbers:
            on_ranks(lambda group, n=number: show_answer(group, n), RANKS)
    elif not words:
        for number in numbers:
            with FAULTS[COURSE[number - 1]].planted():
                on_ranks(lambda group, n=number: show_count(group, n), RANKS)
        on_ranks(end, RANKS)
    elif words[0].isdecimal() and int(words[0]) in numbers and len(words) in (1, 3):
        with FAULTS[COURSE[int(words[0]) - 1]].planted():
            on_ranks(lambda group: show_bug(group, int(words[0]), *words[1:]), RANKS)
    else:
        sys.exit(USAGE)


if __name__ == "__main__":
    main(sys.argv[1:])
