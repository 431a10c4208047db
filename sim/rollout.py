"""The loop of one attempt: observe, act, disturb, step, record."""

from __future__ import annotations

import time
from collections.abc import Mapping

from dayshift.sim.faults import Disturbance
from dayshift.sim.libero_env import LiberoEnv
from dayshift.sim.types import (
    CONTROL_HZ,
    Frame,
    Observation,
    OnFrame,
    OnStart,
    Policy,
    ReportingPolicy,
    RolloutResult,
    RolloutSpec,
    VisionPolicy,
)
from dayshift.types import Outcome


def rollout(
    env: LiberoEnv, policy: Policy, spec: RolloutSpec, on_start: OnStart, on_frame: OnFrame
) -> RolloutResult:
    """Run one attempt to its end. Same spec, policy and versions: the same trajectory, bit by bit.

    `on_start` gets the settled scene, `on_frame` every control step. The outcome is DONE or FAILED,
    by LIBERO's success test alone; an exception of simulator or policy passes through.
    """
    started_at = time.monotonic()
    disturbance = Disturbance(spec.fault)
    num_steps = disturbance.budget(spec.max_steps)
    start_options = {"task": spec.task, "init_state_id": spec.init_state_id, "max_steps": num_steps}
    state = env.reset(seed=spec.seed, options=start_options)[0]["state"]
    policy.reset(spec)
    on_start(spec, env.start_record())

    for index in range(num_steps):
        # observe
        wants_images = isinstance(policy, VisionPolicy) and policy.needs_images()
        is_rendered = wants_images or _is_camera_due(index, spec.camera_hz)
        images = env.render_cameras(spec.cameras, spec.image_size) if is_rendered else {}
        images = disturbance.disturb_images(index, images)
        observation = Observation(state=state, instruction=spec.instruction, images=images)
        sim_state = env.scene.state()

        # act
        action = policy.act(observation)

        # disturb and step
        disturbance.disturb_physics(index, env.scene, action)
        next_observation, reward, is_success, _, _ = env.step(action)

        # record
        on_frame(
            Frame(
                index=index,
                sim_state=sim_state,
                robot_state=state,
                action=action,
                reward=reward,
                success=is_success,
                images=images,
            )
        )
        state = next_observation["state"]
        if is_success:
            return RolloutResult(
                outcome=Outcome.DONE,
                num_control_steps=index + 1,
                wall_s=time.monotonic() - started_at,
                policy_report=_report(policy),
            )

    return RolloutResult(
        outcome=Outcome.FAILED,
        num_control_steps=num_steps,
        wall_s=time.monotonic() - started_at,
        detail=f"no success within {num_steps} control steps",
        policy_report=_report(policy),
    )


def _report(policy: Policy) -> Mapping[str, float]:
    return policy.report() if isinstance(policy, ReportingPolicy) else {}


def _is_camera_due(index: int, camera_hz: float) -> bool:
    """True at the first control step and then at the steps nearest after each 1/camera_hz seconds."""
    if camera_hz <= 0:
        return False
    return index == 0 or int(index * camera_hz / CONTROL_HZ) > int((index - 1) * camera_hz / CONTROL_HZ)
