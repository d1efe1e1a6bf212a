"""Which modules a quantisation configuration means: names, class names, regular expressions and wildcards."""

import fnmatch
import math
import re
from collections.abc import Iterable, Iterator

from laguna_gguf.errors import ConfigError

LINEAR_CLASSES = frozenset({
    "Linear", "LinearBase", "ColumnParallelLinear", "RowParallelLinear", "ReplicatedLinear", "QKVParallelLinear",
    "MergedColumnParallelLinear",
})  # fmt: skip
"""Class names that stand for every matrix of a drafter: torch's and those that vLLM puts in its place."""

MAX_PATTERNS = 4096
MAX_PATTERN_LENGTH = 1024
_MAX_STEPS = 300_000_000
"""Of backtracking, over all modules and expressions of a file: a few seconds at worst."""
_NAME_STEPS = 100
_WILDCARD_STEPS = 1000
_NAME_LENGTH = 40
"""Longer than any module's name."""

_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj",
          "up_proj": "gate_up_proj"}  # fmt: skip

EXACT, REGEX, CLASS = 0, 1, 2
"""How specific a match is; the lowest one decides between groups, as in compressed-tensors."""


def aliases(module: str) -> list[str]:
    """Names that a configuration may use for a module.

    With and without the prefix "model."; a configuration made for split projections also means the fused one, and the
    other way round, since loaders fuse and split at will.
    """
    names = [module]
    owner, _, last = module.rpartition(".")
    if last in _FUSED:
        names.append(f"{owner}.{_FUSED[last]}")
    names += [f"{owner}.{part}" for part, whole in _FUSED.items() if whole == last]
    return names + [f"model.{name}" for name in names]


class Matcher:
    """Matches modules with the entries of one configuration, within a limit on the work.

    Python's matcher of regular expressions backtracks, and the expressions come out of a file: the worst case grows
    with every quantifier and alternative, and with a quantifier on a group it doubles with every letter. Expressions
    whose worst case on the names at hand would take seconds are refused, and so are endless lists.
    """

    def __init__(self) -> None:
        self._compiled: dict[str, tuple[re.Pattern[str], int]] = {}
        self._steps = 0

    def target(self, module: str, target: str, field: str) -> int | None:
        """How a target of compressed-tensors means a module: EXACT, REGEX or CLASS; None when it does not.

        ConfigError names `field`.
        """
        names = aliases(module)
        if not target.startswith("re:"):
            self._count(_NAME_STEPS, target, field)
            return EXACT if target in names else CLASS if target in LINEAR_CLASSES else None
        if target not in self._compiled:
            self._compiled[target] = _compile(target.removeprefix("re:"), field)
        pattern, steps = self._compiled[target]
        self._count(steps * len(names), target, field)
        return REGEX if any(pattern.match(name) for name in names) else None

    def name(self, module: str, name: str, field: str) -> bool:
        """Whether an entry of a plain list means a module: its name, its owner's, its last part, or a wildcard."""
        self._count(_WILDCARD_STEPS, name, field)
        return any(
            alias == name
            or alias.startswith(f"{name}.")
            or alias.endswith(f".{name}")
            or fnmatch.fnmatchcase(alias, name)
            for alias in aliases(module)
        )

    def _count(self, steps: int, entry: str, field: str) -> None:
        self._steps += steps
        if self._steps > _MAX_STEPS:
            raise ConfigError(
                f"{field}: matching its entries may take too long ({_shown(entry)}), needed fewer or simpler ones: few "
                "quantifiers and alternatives, none on a group"
            )


def _compile(pattern: str, field: str) -> tuple[re.Pattern[str], int]:
    """An expression and its largest number of steps on a module's name."""
    plain = re.sub(r"\\.", "x", pattern, flags=re.DOTALL)
    plain = re.sub(r"\[\^?\]?[^\]]*\]", "x", plain)
    n_quantifiers = min(len(re.findall(r"[*+{]", plain)), 20)
    n_branches = min(len(re.findall(r"\||(?<!\()\?", plain)), 40)
    steps = math.comb(_NAME_LENGTH + n_quantifiers, n_quantifiers) << n_branches
    # Verbose mode would let a blank stand between a group and its quantifier.
    if re.search(r"\)[*+{]|\(\?[a-zA-Z-]*x", plain):
        steps = _MAX_STEPS + 1
    try:
        return re.compile(pattern), steps
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"{field}: {_shown(pattern)} is not a regular expression ({error})") from error


def strings(value: object, field: str) -> list[str]:
    """A list of names or patterns (None: an empty one); ConfigError otherwise."""
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > MAX_PATTERNS:
        raise ConfigError(f"{field}: found {_shown(value)}, needed a list of at most {MAX_PATTERNS} names")
    return list(_checked(value, field))


def _checked(values: Iterable[object], field: str) -> Iterator[str]:
    for value in values:
        if not isinstance(value, str) or len(value) > MAX_PATTERN_LENGTH:
            raise ConfigError(f"{field}: found {_shown(value)}, needed names of at most {MAX_PATTERN_LENGTH} letters")
        yield value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
