"""The pairs that the witness tests, and their histories.

What is hard: 1,024 instances are a quarter of a million pairs. So only those have a history here
that were tested, or about which another process reported; the others are counted through, round by
round, and all that looks at every pair runs in time slices.
"""

import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from zlib import crc32

from cleave.gateway.witness.pair_recorder import PairKey
from cleave.policy import pair_trust
from cleave.policy.pair_trust import PairHistory, PairStanding, PullRate, RatedPair
from cleave.router.instance import RoutedInstance
from cleave.router.score_table import ScoreTable, list_uses
from cleave.rpc.v1 import agent_pb2
from cleave.time_slices import Steps

PAIRS_PER_TICK = 1024
"""32 x 32 instances, 2 ms of the event loop; larger fleets are looked at in turn."""
NEW_PER_TICK = 32
"""Of them, pairs without a history that may be tested."""
MAX_COMPARED = 128
"""Of the pairs of two engines, and of others, those with whose rates a pair is compared."""
TRUST = {
    PairStanding.UNPROVEN: agent_pb2.TRUST_UNSPECIFIED,
    PairStanding.PROVEN: agent_pb2.TRUST_PROVEN,
    PairStanding.SUSPECT: agent_pb2.TRUST_SUSPECT,
    PairStanding.FAILED: agent_pb2.TRUST_FAILED,
}
STANDINGS: Mapping[int, PairStanding] = {trust: standing for standing, trust in TRUST.items()}


@dataclass(slots=True)
class WitnessedPair:
    """One pair and its history."""

    key: PairKey
    """Of these boots alone, also when an instance has another one already."""
    prefill: RoutedInstance
    decode: RoutedInstance
    history: PairHistory
    num_partners: int
    """Decode instances of its prefill instance, or the other way round: the larger number."""
    rates: tuple[PullRate, ...] = ()
    """The newest NUM_RATES."""
    steady: tuple[float, ...] = ()
    """Bytes/s of the newest NUM_USUAL canaries that were near what was due."""
    usual_bytes_per_s: float = 0.0
    """Median of `steady`; 0: there are too few."""
    reason: str = ""
    """The newest fault."""
    blur: str = ""
    """Why a canary showed nothing, as it was logged last."""

    @property
    def name(self) -> str:
        """As logs and reasons show it."""
        return f"{self.prefill.name} -> {self.decode.name}"

    @property
    def has_ended(self) -> bool:
        """Whether one of its engines has restarted."""
        return self.key != (self.prefill.target.boot_id, self.decode.target.boot_id)

    @property
    def rate(self) -> PullRate:
        """The best of the newest rates; 0: not measured yet."""
        return max(self.rates, key=lambda rate: rate.bytes_per_s, default=PullRate(0.0, 0.0))

    @property
    def link(self) -> tuple[bool, str, str]:
        """What is known of its link: whether it stays in a cell, and the engines' transports."""
        prefill, decode = self.prefill.registration, self.decode.registration
        is_within_cell = prefill.cell == decode.cell
        return is_within_cell, prefill.kv_path.transport, decode.kv_path.transport

    @property
    def rated(self) -> RatedPair:
        """Its rate beside its usual one."""
        return RatedPair(*self.key, self.rate.bytes_per_s, self.usual_bytes_per_s)

    def record_steady(self, bytes_per_s: float) -> None:
        """Include a rate in what is usual."""
        self.steady = (*self.steady, bytes_per_s)[-pair_trust.NUM_USUAL :]
        if len(self.steady) >= pair_trust.MIN_USUAL:
            self.usual_bytes_per_s = statistics.median(self.steady)


@dataclass(frozen=True, slots=True)
class _Partners:
    """The instances of a table, by boot: each that prefills hands over to each that decodes."""

    prefills: dict[str, RoutedInstance]
    decodes: dict[str, RoutedInstance]

    @property
    def count(self) -> int:
        """Pairs of the engine that has the most."""
        return max(len(self.prefills), len(self.decodes))


class PairList:
    """All pairs of some tables."""

    def __init__(self, period_s: float) -> None:
        """`period_s`: over which the first tests of pairs are spread."""
        self._period_s = period_s
        self._partners: list[_Partners] = []
        """Of each table."""
        self._since: dict[str, float] = {}
        """When each boot was seen first."""
        self._known: dict[PairKey, WitnessedPair] = {}
        """Those with a history."""
        self._by_boot: dict[str, dict[PairKey, WitnessedPair]] = {}
        """The same, by the boots of both engines."""
        self._newest_rated: deque[WitnessedPair] = deque(maxlen=MAX_COMPARED)
        self._round: Iterator[tuple[_Partners, PairKey]] = iter(())
        """The pairs that have yet to be looked at in this round over all."""
        self._num_rounds = 0

    @property
    def boots(self) -> Iterable[str]:
        """Of all engines that have a partner."""
        return self._since.keys()

    def update(self, tables: Iterable[ScoreTable], now: float) -> Steps[None]:
        """Adapt the pairs to the instances, keeping the histories of those that remain."""
        every: list[_Partners] = []
        for table in tables:
            uses = [(instance, list_uses(instance)) for instance in table.instances]
            prefills = {i.target.boot_id: i for i, each in uses if "prefill" in each}
            decodes = {i.target.boot_id: i for i, each in uses if "decode" in each}
            if prefills and decodes:
                every.append(_Partners(prefills, decodes))
            yield
        by_boot = {boot: each for each in every for boot in (*each.prefills, *each.decodes)}
        remaining: list[WitnessedPair] = []
        for (prefill, decode), pair in self._known.items():
            partners = by_boot.get(prefill)
            if partners and prefill in partners.prefills and decode in partners.decodes:
                pair.prefill, pair.decode = partners.prefills[prefill], partners.decodes[decode]
                pair.num_partners = partners.count
                remaining.append(pair)
            yield
        self._partners, self._round = every, iter(())
        self._since = {boot: self._since.get(boot, now) for boot in by_boot}
        self._known, self._by_boot = {}, {}
        for pair in remaining:
            self.keep(pair)
            yield

    def keep(self, pair: WitnessedPair) -> None:
        """Keep the history of a pair."""
        self._known[pair.key] = pair
        for boot in pair.key:
            self._by_boot.setdefault(boot, {})[pair.key] = pair

    def has(self, pair: WitnessedPair) -> bool:
        """Whether its engines are still there, and its history is kept."""
        return self._known.get(pair.key) is pair

    def take_next(self, now: float) -> list[WitnessedPair]:
        """The next pairs of a round over all: those with a history, and a few others that are due.
        A large fleet has more than one tick may look at."""
        pairs: list[WitnessedPair] = []
        num_new = 0
        for partners, key in self._list_next():
            pair = self._known.get(key)
            if pair is None:
                is_reported = key[0] in partners.decodes[key[1]].pairs
                may_be_tested = num_new < NEW_PER_TICK and now >= self._compute_due_s(key)
                if not is_reported and not may_be_tested:
                    continue
                num_new += 1
                pair = _make_pair(partners, key, now)
                if is_reported:
                    self.keep(pair)
            pairs.append(pair)
        return pairs

    def list_neighbors(self, pair: WitnessedPair) -> list[WitnessedPair]:
        """Pairs of its engines that have a history, itself included."""
        return [each for boot in pair.key for each in self._by_boot.get(boot, {}).values()]

    def list_like(self, pair: WitnessedPair) -> list[WitnessedPair]:
        """Pairs that were measured over links like that of a pair whose rate has been measured
        now, itself included: of its engines, and others."""
        self._newest_rated.append(pair)
        measured: dict[PairKey, WitnessedPair] = {}
        for each in (*self._newest_rated, *self.list_neighbors(pair)):
            if (
                each.rates
                and self.has(each)
                and each.link == pair.link
                and each.decode.score_table is pair.decode.score_table
            ):
                measured[each.key] = each
                if len(measured) >= 3 * MAX_COMPARED:
                    break
        return list(measured.values())

    def _list_next(self) -> list[tuple[_Partners, PairKey]]:
        taken = list(islice(self._round, PAIRS_PER_TICK))
        if not taken:
            self._round = self._list_all()
            taken = list(islice(self._round, PAIRS_PER_TICK))
        return taken

    def _list_all(self) -> Iterator[tuple[_Partners, PairKey]]:
        # Each round begins with others, as a tick may not reach all that are due.
        self._num_rounds += 1
        for partners in self._partners:
            prefills, decodes = (
                _rotate([*each], self._num_rounds) for each in (partners.prefills, partners.decodes)
            )
            for prefill in prefills:
                for decode in decodes:
                    yield partners, (prefill, decode)

    def _compute_due_s(self, key: PairKey) -> float:
        """When a pair without a history is tested. The agents have just tested both engines, so
        that these canaries are spread."""
        share = crc32("/".join(key).encode()) / 0xFFFFFFFF
        return max(self._since[boot] for boot in key) + share * self._period_s


def _rotate(boots: list[str], count: int) -> list[str]:
    at = count % len(boots)
    return boots[at:] + boots[:at]


def _make_pair(partners: _Partners, key: PairKey, now: float) -> WitnessedPair:
    """A pair without a history, or with what another process has recorded. It is due."""
    prefill, decode = partners.prefills[key[0]], partners.decodes[key[1]]
    history = PairHistory(now)
    recorded = decode.pairs.get(key[0])
    if recorded is not None:
        history.restore(STANDINGS.get(recorded.trust, PairStanding.UNPROVEN))
    return WitnessedPair(key, prefill, decode, history, partners.count)
