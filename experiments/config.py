"""What an experiment's YAML may say. `docs/experiments.md` is made from these models.

Every key has an effect; an unknown key is an error. Types are strict: `"3"` is no number. Checks that
need more than one key, or the machine, are in `loading.py` and `preflight.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from dayshift.engine.config import KVAtRest, KVCacheDType
from dayshift.engine.servable import Sharing
from dayshift.planner.memory import MemoryArm

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Sentence = Annotated[str, Field(min_length=1)]
HttpUrl = Annotated[str, Field(pattern=r"^https?://[^/\s]+")]
PolicyUrl = Annotated[str, Field(pattern=r"^(https?|wss?)://[^/\s]+")]
DatabaseUrl = Annotated[str, Field(pattern=r"^[a-z0-9_+]+://")]

DEFAULT_MODEL = "default"  # the weights that come with the planner
_OF_OUR_ENGINE = {"weights", "sharing"}  # keys of a policy that say what our engine serves, and how
_DRAWN = {"num_shifts", "jobs_per_shift", "steps_per_job", "tasks"}  # keys of a plan that is not written out


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, no NaN or infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class RobotsConfig(Section):
    """The robots. Each has its own planner session and its own plan."""

    live: Annotated[int, Field(ge=1, le=99)] = 1
    """How many robots run in MuJoCo, each in a process of its own."""


class PlanConfig(Section):
    """What the robots have to do: written out (`shifts`), or drawn from `tasks` by the seed."""

    num_shifts: Annotated[int, Field(ge=1, le=999)] = 3
    """Shifts per robot."""
    jobs_per_shift: Annotated[int, Field(ge=1, le=99)] = 2
    """Jobs in a shift."""
    steps_per_job: Annotated[int, Field(ge=1, le=99)] = 2
    """Job steps in a job."""
    tasks: Annotated[tuple[Sentence, ...], Field(min_length=1)] | None = None
    """The sentences to draw from; default: all of the suite. Each is drawn equally often."""
    shifts: (
        Annotated[
            tuple[
                Annotated[
                    tuple[Annotated[tuple[Sentence, ...], Field(min_length=1)], ...], Field(min_length=1)
                ],
                ...,
            ],
            Field(min_length=1),
        ]
        | None
    ) = None
    """The plan written out: a list of shifts, each a list of jobs, each a list of sentences."""

    @model_validator(mode="after")
    def _one_of_two(self) -> PlanConfig:
        drawn = self.model_fields_set & _DRAWN
        if self.shifts is not None and drawn:
            raise ValueError(f"shifts writes the plan out, so {', '.join(sorted(drawn))} cannot be set too")
        return self

    @model_serializer(mode="wrap")
    def _only_what_counts(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = serialize(self)
        return {key: fields[key] for key in fields if self.shifts is None or key not in _DRAWN}

    @property
    def shape(self) -> tuple[tuple[int, ...], ...]:
        """Number of job steps, per shift and job."""
        if self.shifts is not None:
            return tuple(tuple(len(job) for job in shift) for shift in self.shifts)
        return ((self.steps_per_job,) * self.jobs_per_shift,) * self.num_shifts


class PlannerConfig(Section):
    """Who decides, and what it remembers."""

    model: str = DEFAULT_MODEL
    """`default` (the small model that comes with Dayshift), a folder with a model, or a model's id."""
    memory: MemoryArm = MemoryArm.RECALL_KV
    """What the planner still has of earlier shifts; see the table of arms above."""
    dialect: Literal["auto", "compact", "general"] = "auto"
    """The prompts: `compact` is what the default model was trained on; `auto` uses it for that model only."""
    window: Annotated[int, Field(ge=128)] = 8192
    """Tokens that a session keeps, system prompt included."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """0 always takes the most likely token."""
    base_url: HttpUrl | None = None
    """An OpenAI-compatible server to call instead of our engine (`…/v1`); memory `full` or `off` only."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key of `base_url`."""
    timeout_s: Positive = 120.0
    """Longest wait for one reply."""


class RulesConfig(Section):
    """When a job step is tried again, when it is given up, and how long a reply may be."""

    max_attempts: Annotated[int, Field(ge=1, le=20)] = 2
    """Attempts at a job step before it is given up; counted anew in a review."""
    max_infra_retries: Annotated[int, Field(ge=0, le=20)] = 2
    """Further tries of a job step when the simulator broke."""
    max_repairs: Annotated[int, Field(ge=0, le=5)] = 1
    """How often an unusable reply is asked for again, with the error told."""
    max_command_tokens: Annotated[int, Field(ge=16, le=65536)] = 96
    """Longest command; what is longer is cut off and cannot be used."""
    max_review_tokens: Annotated[int, Field(ge=16, le=65536)] = 512
    """Longest answer to a review."""
    planner_retry_delays_s: tuple[Annotated[float, Field(ge=0, le=3600)], ...] = (0.5, 2.0, 8.0)
    """Waits before a call that got no reply is made again, one call after each."""
    max_planner_outages: Annotated[int, Field(ge=1, le=100)] = 3
    """Questions in a row without a reply that stop the run; it can be resumed."""


class PolicyConfig(Section):
    """Who moves the robot."""

    kind: Literal["scripted_expert", "smolvla"] = "scripted_expert"
    """`scripted_expert`: reads the simulator's state; the control arm, needs no model. `smolvla`: a SmolVLA
    checkpoint, served by the engine beside the planner. `policy: smolvla` is short for this key alone."""
    weights: str = DEFAULT_MODEL
    """`default` (the small policy that comes with Dayshift), a folder with a checkpoint, or a hub's id."""
    url: PolicyUrl | None = None
    """A policy server instead of `weights`: `http://…` (ours) or `ws://…` (openpi's protocol)."""
    sharing: Sharing = "slices"
    """How it shares the engine's GPU with the planner: `slices` of its work between the planner's steps, or
    `streams`, a CUDA stream of its own beside them."""
    n_action_steps: Count | None = None
    """Actions of a chunk that are executed before the next one; default: as many as the policy means."""
    n_ahead_steps: Annotated[int, Field(ge=0)] = 0
    """Control steps before a chunk is due at which it is asked for."""
    blending: Literal["replace", "linear", "ensemble", "rtc"] = "replace"
    """What happens where chunks overlap; `rtc`: real-time chunking."""
    pace: Literal["wait", "real_time"] = "wait"
    """`wait`: the simulator waits for late chunks; `real_time`: it does not, and the robot holds still."""

    @model_validator(mode="before")
    @classmethod
    def _kind_alone(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _only_of_smolvla(self) -> PolicyConfig:
        given = self.model_fields_set - {"kind"}
        if self.kind == "scripted_expert" and given:
            raise ValueError(f"{', '.join(sorted(given))} cannot be set for the scripted expert")
        if self.url is not None and (own := given & _OF_OUR_ENGINE):
            raise ValueError(f"{' and '.join(sorted(own))} cannot be set beside url")
        return self

    @model_serializer(mode="wrap")
    def _only_what_counts(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = serialize(self)
        if self.kind == "scripted_expert":
            return {"kind": self.kind}
        return {key: fields[key] for key in fields if key not in _OF_OUR_ENGINE or self.url is None}


class SimConfig(Section):
    """The simulator."""

    max_steps: Annotated[int, Field(ge=10, le=5000)] = 300
    """Control steps (20 per second) in which an attempt must succeed."""
    num_init_states: Annotated[int, Field(ge=1, le=50)] = 50
    """Which of LIBERO's initial states are used: the first so many."""
    camera_hz: Annotated[float, Field(ge=0, le=20)] = 0.0
    """Camera frames per simulated second that are rendered live and kept as video; 0: none."""
    image_size: Annotated[int, Field(ge=32, le=1024, multiple_of=2)] = 256
    """Width and height of a camera frame, in pixels."""


class FaultConfig(Section):
    """A disturbance in physics, and the attempts that it holds for. The first that fits an attempt acts."""

    kind: Literal["gripper_slip", "push", "short_budget", "blocked_view"]
    """`gripper_slip`: the fingers lose their force; `push`: a force on the object; `short_budget`: fewer
    control steps; `blocked_view`: the cameras see black."""
    robot: Annotated[int, Field(ge=1, le=99)] | None = None
    """Only this robot (1 is the first)."""
    task: Sentence | None = None
    """Only steps with this sentence."""
    shift: Count | None = None
    """Only this shift."""
    job: Count | None = None
    """Only this job of a shift."""
    step: Count | None = None
    """Only this step of a job."""
    attempts: Annotated[tuple[Count, ...], Field(min_length=1)] | None = None
    """Only these attempts; default: all."""
    probability: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the steps it fits that it hits. Drawn from the seed for each step, not for each attempt."""
    in_reviews: bool = True
    """Whether the fault still holds when the step is tried again in a review."""
    at_step: Annotated[int, Field(ge=0)] | None = None
    """Control step at which it begins; default: the kind's own."""
    num_steps: Count | None = None
    """How many control steps it lasts; default: the kind's own."""
    strength: Positive | None = None
    """Newton for `push` and, on each finger, `gripper_slip`; fraction of the step budget for `short_budget`;
    default: the kind's own."""


class EngineConfig(Section):
    """Our inference engine, started for the run in a process of its own (not for memory `oracle`)."""

    url: HttpUrl | None = None
    """A `dayshift serve` that runs already, instead of starting one; `planner.model` must be its model."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: CUDA where there is a GPU."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto`: bfloat16 on a GPU, float32 on a CPU."""
    kv_cache_gib: Positive | None = None
    """Memory for keys and values, in GiB; default: most of a GPU's free memory, 1 on a CPU."""
    kv_cache_dtype: KVCacheDType = "auto"
    """Keys and values in use: `auto` as the model computes; `int8` and `fp8` take half of bfloat16."""
    host_kv_gib: Positive | None = None
    """Host memory for the KV of parked sessions and archived turns, in GiB; default: 8 with a GPU, 0.25 on a
    CPU. What exceeds it goes to disk."""
    kv_at_rest: KVAtRest = "exact"
    """How the KV of archived turns and parked sessions is kept: `exact` as in use; the others are smaller
    and lossy, see docs/session-memory.md."""
    store_quota_gib: Positive | None = None
    """Largest size of the run's session files, in GiB; KV of closed sessions makes room for other KV."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of its HTTP server on 127.0.0.1; 0: any free one."""


class RecordConfig(Section):
    """Where the run is recorded."""

    database: DatabaseUrl | None = None
    """SQLAlchemy URL; default: SQLite in the run's folder."""
    prerender: bool = False
    """Render what an export will need beside the run, at low priority; see `dayshift prerender`."""


class Experiment(Section):
    """One run, fully determined."""

    name: Name = "experiment"
    """Begins the name of the run's folder."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Plan, initial states, fixture poses and sampling follow from it."""
    robots: RobotsConfig = RobotsConfig()
    plan: PlanConfig = PlanConfig()
    planner: PlannerConfig = PlannerConfig()
    rules: RulesConfig = RulesConfig()
    policy: PolicyConfig = PolicyConfig()
    sim: SimConfig = SimConfig()
    faults: tuple[FaultConfig, ...] = ()
    engine: EngineConfig = EngineConfig()
    record: RecordConfig = RecordConfig()

    def resolved(self) -> dict[str, Any]:
        """Every key that has a value, as YAML and JSON can hold it; loads again as the same experiment."""
        return self.model_dump(mode="json", exclude_none=True)
