"""How a controller gets a plan: it makes one, from a policy and a topology, or follows a saved one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from weft.config import Settings, TransferSettings
from weft.core.assign import Policy
from weft.core.planner import parse_policy
from weft.core.plans import plan_file
from weft.core.plans.plan import Plan
from weft.core.topology import Cluster, load_topology
from weft.core.version import CommitPolicy
from weft.errors import ConfigError
from weft.runtime.compile.following import follow_plan
from weft.runtime.compile.matching import plan_members, reported_cluster
from weft.runtime.control.messages import Join

DEFAULT_TOPOLOGY = "h100-ib400"


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """What was requested when the controller was started; unknown names and bad files are errors at that point."""

    policy: Policy
    cluster: Cluster | None
    """The kind of hosts; None: the default, with the network cards that members report."""
    ignore: Sequence[str]
    transfer: TransferSettings
    """How versions are transferred; the plan says the same."""
    saved: Plan | None
    """A plan to follow instead."""
    any_place: bool = False
    """Whether members may be elsewhere than the saved plan says."""
    saved_digest: str = ""

    @classmethod
    def of(
        cls,
        *,
        policy: Policy | str | None,
        topology: Cluster | Path | str | None,
        ignore: Sequence[str],
        plan: Plan | Path | str | None,
        any_place: bool = False,
        rebalance: bool = False,
        transfer: TransferSettings,
    ) -> Planning:
        """Check and load what was given; None: the default."""
        if plan is not None and (policy is not None or topology is not None or ignore):
            raise ConfigError(
                "a saved plan cannot be combined with `policy`, `topology` or `ignore`",
                hint="the plan fixes all three: pass them to `weft plan` instead",
            )
        if plan is not None and rebalance:
            raise ConfigError("a saved plan cannot be rebalanced", hint="leave out `rebalance` or `plan`")
        if plan is None and any_place:
            raise ConfigError("`any_place` needs a saved plan", hint="leave it out: members are planned where they are")
        if isinstance(policy, CommitPolicy):
            raise ConfigError(
                f"`policy` is the commit policy `{policy}`, expected a sending policy",
                hint=f"pass it as `commit_policy`; sending policies: {', '.join(Policy)}",
            )
        saved = _saved_plan(plan)
        if saved is not None:
            transfer = _as_planned(saved, transfer)
        return cls(
            policy=parse_policy(Policy.BALANCED if policy is None else policy),
            cluster=None if topology is None else _cluster(topology),
            ignore=ignore,
            transfer=transfer,
            saved=saved,
            any_place=any_place,
            saved_digest="" if saved is None else plan_file.digest(saved),
        )

    def check_members(self, *, num_trainers: int, num_engine_ranks: int, ranks_per_engine: int) -> None:
        """Raise if the saved plan is for different numbers of members."""
        if self.saved is None:
            return
        recipe = self.saved.recipe
        planned = (
            self.saved.trainer.num_ranks,
            recipe.engine.num_ranks,
            recipe.engine.num_ranks // recipe.num_replicas,
        )
        if planned != (num_trainers, num_engine_ranks, ranks_per_engine):
            raise ConfigError(
                f"the plan is for {_members(*planned)}, the controller waits for "
                f"{_members(num_trainers, num_engine_ranks, ranks_per_engine)}",
                hint=f"--trainers {planned[0]} --engine-ranks {planned[1]} --ranks-per-engine {planned[2]}",
            )

    def plan(
        self,
        trainers: Mapping[int, Join],
        engines: Mapping[int, Join],
        *,
        ranks_per_engine: int,
        speeds: Mapping[str, float],
    ) -> tuple[Plan, str]:
        """The plan between the members that joined, and its digest: the file's, if there is one.

        `speeds`: hosts that carry only a fraction of what they report.
        """
        if self.saved is not None:
            plan = follow_plan(
                self.saved, trainers, engines, ranks_per_engine=ranks_per_engine, any_place=self.any_place
            )
            return plan, self.saved_digest
        joins = [*trainers.values(), *engines.values()]
        plan = plan_members(
            trainers,
            engines,
            self.cluster or reported_cluster(load_topology(DEFAULT_TOPOLOGY), joins),
            ranks_per_engine=ranks_per_engine,
            policy=self.policy,
            ignore=self.ignore,
            settings=self.transfer.planned,
            speeds=speeds,
        )
        return plan, plan_file.digest(plan)


def _members(num_trainers: int, num_engine_ranks: int, ranks_per_engine: int) -> str:
    return f"{num_trainers} trainers and {num_engine_ranks} engine ranks in engines of {ranks_per_engine}"


def _as_planned(saved: Plan, transfer: TransferSettings) -> TransferSettings:
    """The settings of a saved plan, which fixes how bytes travel; raises if others were given."""
    planned, usual = asdict(saved.settings), asdict(Settings())
    given = {name: value for name in planned if (value := getattr(transfer, name)) != usual[name]}
    wrong = [
        f"{name} is {value}, the plan has {planned[name]}" for name, value in given.items() if value != planned[name]
    ]
    if wrong:
        raise ConfigError(
            f"settings differ from the saved plan: {'; '.join(wrong)}",
            hint="leave them out, or make the plan again with them",
        )
    return replace(transfer, **planned)


def _saved_plan(plan: Plan | Path | str | None) -> Plan | None:
    if isinstance(plan, str | Path):
        return plan_file.load(Path(plan))
    if plan is not None and not isinstance(plan, Plan):
        raise ConfigError(f"`plan` is a {type(plan).__name__}", hint="pass the path of a saved plan, or a weft.Plan")
    return plan


def _cluster(topology: Cluster | Path | str) -> Cluster:
    if isinstance(topology, str | Path):
        return load_topology(str(topology))
    if not isinstance(topology, Cluster):
        hint = "pass a preset, a path to a .toml file, or what `weft.load_topology` returns"
        raise ConfigError(f"`topology` is a {type(topology).__name__}", hint=hint)
    return topology
