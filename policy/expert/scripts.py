"""How each of LIBERO-Goal's ten tasks is done. Heights are above the floor, the table's top is at 0.90 m."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike
from scipy.spatial.transform import Rotation

from dayshift.policy.expert.hand import DOWN, Hand, Motion, Vector

BOWL, PLATE, BOTTLE, CHEESE = "akita_black_bowl_1", "plate_1", "wine_bottle_1", "cream_cheese_1"
CABINET, STOVE, RACK = "wooden_cabinet_1", "flat_stove_1", "wine_rack_1"

BOWL_RIM_RADIUS, BOWL_RIM_HEIGHT = 0.048, 0.935
PLATE_RIM_RADIUS, PLATE_RIM_HEIGHT = 0.060, 0.914
BOTTLE_NECK = 0.115  # above the bottle's origin
CHEESE_HEIGHT = 0.912
APPROACH = 0.10  # above what is grasped
RELEASE_CLEARANCE = 0.004

TOP_OF_CABINET_CARRY = 1.27  # heights at which things are carried
BOTTLE_CARRY = 1.33
RACK_CARRY = 1.38
TABLE_CARRY = 1.05

# A drawer's handle in the drawer's frame, by drawer.
HANDLE = {
    "top": np.array([-0.00278, -0.10161, 0.18393]),
    "middle": np.array([-0.00278, -0.10161, 0.11041]),
}
KNOB_GRASP = 0.038  # above the knob's origin
TOP_DRAWER_OPEN = -0.155  # of its slide, metres


def rotated(degrees: float, axis: str) -> Rotation:
    """The downward hand, turned about a world axis."""
    return Rotation.from_euler(axis, degrees, degrees=True) * DOWN


def vector(x: float, y: float, z: float) -> Vector:
    """Offset or position in the world frame, metres."""
    return np.array([x, y, z], dtype=np.float64)


# ---- what several tasks need ----


def origin(hand: Hand, thing: str) -> Vector:
    """Position of an object's or fixture's origin."""
    return hand.body(f"{thing}_main")


def grasp(
    hand: Hand, position: ArrayLike, rotation: Rotation = DOWN, approach: float | None = None
) -> Motion:
    """Come from above (from height `approach`), close the fingers at `position`."""
    x, y, z = np.asarray(position)
    above = z + APPROACH if approach is None else approach
    yield from hand.move_to([x, y, above], rotation, tolerance=0.015)
    yield from hand.move_to([x, y, z], rotation, tolerance=0.006)
    yield from hand.close()


def rim_grasp(thing: Vector, radius: float, height: float, degrees: float) -> tuple[Vector, Rotation]:
    """Pose that has the rim of a bowl or plate between the fingers, at a polar angle of the rim."""
    angle = np.deg2rad(degrees)
    x, y = thing[:2] + radius * np.array([np.cos(angle), np.sin(angle)])
    return np.array([x, y, height]), rotated(degrees - 90, "z")


def place(
    hand: Hand, thing: str, target: Vector, rotation: Rotation = DOWN, *, carry: float = TOP_OF_CABINET_CARRY
) -> Motion:
    """Carry the held thing at height `carry` until its origin is at `target`, and release it."""
    yield from hand.lift_to(carry, rotation)
    grip = hand.position - origin(hand, thing)
    x, y, _ = target + grip
    yield from hand.move_to([x, y, carry], rotation, tolerance=0.015)
    grip = hand.position - origin(hand, thing)
    above = target + grip + vector(0, 0, RELEASE_CLEARANCE)
    yield from hand.move_to(above, rotation, tolerance=0.006, max_speed=0.6)
    yield from hand.open()
    yield from hand.lift_to(hand.position[2] + 0.08, rotation)
    yield from hand.wait(10)


def put_bowl(hand: Hand, target: Vector, carry: float) -> Motion:
    """Bowl by its rim, to `target`."""
    position, rotation = rim_grasp(origin(hand, BOWL), BOWL_RIM_RADIUS, BOWL_RIM_HEIGHT, 90)
    yield from grasp(hand, position, rotation)
    yield from place(hand, BOWL, target, rotation, carry=carry)


def grasp_bottle(hand: Hand) -> Motion:
    """Bottle by its neck."""
    yield from grasp(hand, origin(hand, BOTTLE) + vector(0, 0, BOTTLE_NECK), approach=1.15)


def handle(hand: Hand, drawer: str) -> Vector:
    """Where a drawer's handle is now."""
    body = f"{CABINET}_cabinet_{drawer}"
    return hand.body(body) + hand.body_rotation(body).apply(HANDLE[drawer])


def pull_drawer(hand: Hand, drawer: str, until: float) -> Motion:
    """Hand horizontal, fingers above and below the handle's bar, pull towards +y until the joint is there."""
    level = rotated(-85, "x")
    bar = handle(hand, drawer)
    yield from hand.move_to(
        bar + vector(-0.05, 0.22, 0.10), rotated(-45, "x"), tolerance=0.03, angle_tolerance=0.3
    )
    yield from hand.move_to(bar + vector(0, 0.13, 0), level, tolerance=0.015)
    yield from hand.move_to(bar, level, tolerance=0.007, max_speed=0.5)
    yield from hand.close()
    for _ in range(80):
        if hand.joint(f"{CABINET}_{drawer}_level") < until:
            return
        bar = handle(hand, drawer)
        yield hand.towards(np.array([bar[0], hand.position[1] + 0.03, bar[2]]), level)


# ---- the ten tasks ----


def open_the_middle_drawer(hand: Hand) -> Motion:
    """Pull its handle."""
    yield from pull_drawer(hand, "middle", until=-0.16)


def put_the_bowl_on_the_stove(hand: Hand) -> Motion:
    """By the rim, on the cooking plate."""
    x, y, _ = hand.site(f"{STOVE}_cook_region")
    yield from put_bowl(hand, np.array([x, y, 0.930]), carry=1.08)


def put_the_wine_bottle_on_top_of_the_cabinet(hand: Hand) -> Motion:
    """By the neck, on the side that is nearer to the robot."""
    yield from grasp_bottle(hand)
    yield from place(
        hand, BOTTLE, hand.site(f"{CABINET}_top_side") + vector(0, 0.02, 0.002), carry=BOTTLE_CARRY
    )


def open_the_top_drawer_and_put_the_bowl_inside(hand: Hand) -> Motion:
    """Pull the handle, back out, then the bowl by a side of its rim that the open drawer leaves free.

    A drawer that is open already is left so.
    """
    if hand.joint(f"{CABINET}_top_level") > TOP_DRAWER_OPEN:
        yield from pull_drawer(hand, "top", until=TOP_DRAWER_OPEN)
        yield from hand.open()
        yield from hand.move_by([0, 0.07, 0], hand.rotation, tolerance=0.015)
        yield from hand.move_to(
            hand.position + vector(-0.15, 0.12, 0.12), rotated(-40, "x"), tolerance=0.04, angle_tolerance=0.4
        )
    # The drawer now hangs over the bowl's edge: come from the other side, leaning away from it.
    position, rotation = rim_grasp(origin(hand, BOWL), BOWL_RIM_RADIUS, BOWL_RIM_HEIGHT, 150)
    outwards = Rotation.from_euler("z", 150, degrees=True).apply([1.0, 0.0, 0.0])
    lean = Rotation.from_rotvec(np.deg2rad(20) * np.cross([0, 0, 1], outwards))
    rotation = lean * rotation
    yield from hand.move_to(
        position + 0.12 * outwards + vector(0, 0, 0.15), rotation, tolerance=0.04, angle_tolerance=0.3
    )
    yield from hand.move_to(position + 0.02 * outwards + vector(0, 0, 0.05), rotation, tolerance=0.01)
    yield from hand.move_to(position, rotation, tolerance=0.006)
    yield from hand.close()
    yield from hand.move_to(hand.position + 0.03 * outwards + vector(0, 0, 0.025), rotation, tolerance=0.01)
    yield from hand.move_by([-0.09, 0.03, 0.01], rotation, tolerance=0.02)
    inside = hand.site(f"{CABINET}_top_region") + vector(0, 0, -0.026)
    yield from place(hand, BOWL, inside, rotation, carry=1.25)


def put_the_bowl_on_top_of_the_cabinet(hand: Hand) -> Motion:
    """By the rim, carried above the cabinet."""
    yield from put_bowl(
        hand, hand.site(f"{CABINET}_top_side") + vector(0, 0.02, 0.002), carry=TOP_OF_CABINET_CARRY
    )


def push_the_plate_to_the_front_of_the_stove(hand: Hand) -> Motion:
    """Drag it by the rim, round the bowl."""
    position, rotation = rim_grasp(origin(hand, PLATE), PLATE_RIM_RADIUS, PLATE_RIM_HEIGHT, 90)
    yield from grasp(hand, position, rotation)
    around_the_bowl = ([0.075, 0.10], [0.05, 0.21])
    for x, y in around_the_bowl:
        grip = hand.position - origin(hand, PLATE)
        yield from hand.move_to([x + grip[0], y + grip[1], 0.918], rotation, tolerance=0.015)
    x, y, _ = hand.site("main_table_stove_front_region") + hand.position - origin(hand, PLATE)
    yield from hand.move_to([x, y, PLATE_RIM_HEIGHT], rotation, tolerance=0.006)
    yield from hand.open()
    yield from hand.lift_to(1.0, rotation)


def put_the_cream_cheese_in_the_bowl(hand: Hand) -> Motion:
    """Across its long axis, dropped from just above the bowl."""
    long_axis = hand.body_rotation(f"{CHEESE}_main").as_matrix()[:2, 0]
    yaw = (np.rad2deg(np.arctan2(long_axis[1], long_axis[0])) + 90) % 180 - 90
    rotation = rotated(yaw, "z")
    x, y, _ = origin(hand, CHEESE)
    yield from grasp(hand, [x, y, CHEESE_HEIGHT], rotation)
    yield from place(hand, CHEESE, origin(hand, BOWL) + vector(0, 0, 0.05), rotation, carry=TABLE_CARRY)


def turn_on_the_stove(hand: Hand) -> Motion:
    """Grasp the knob from above and turn the hand."""
    knob = hand.body(f"{STOVE}_button") + vector(0, 0, KNOB_GRASP)
    yield from hand.move_to(knob + vector(0, 0, 0.112), tolerance=0.015)
    yield from hand.move_to(knob, tolerance=0.006, max_speed=0.5)  # the elbow is near its limit here
    yield from hand.close()
    for step in range(1, 40):
        turned = Rotation.from_euler("z", min(0.06 * step, 1.4)) * DOWN
        yield hand.towards(knob, turned)


def put_the_bowl_on_the_plate(hand: Hand) -> Motion:
    """By the rim, on the middle of the plate."""
    yield from put_bowl(hand, origin(hand, PLATE) + vector(0, 0, 0.004), carry=TABLE_CARRY)


def put_the_wine_bottle_on_the_rack(hand: Hand) -> Motion:
    """By the neck, lowered until it touches the rack."""
    yield from grasp_bottle(hand)
    yield from hand.lift_to(RACK_CARRY)
    grip = hand.position - origin(hand, BOTTLE)
    target = hand.site(f"{RACK}_top_region") + grip + vector(0, -0.04, 0.01)
    yield from hand.move_to([target[0], target[1], RACK_CARRY], tolerance=0.015)
    yield from hand.move_to(target, tolerance=0.004, max_speed=0.4)


SCRIPTS: dict[str, Callable[[Hand], Motion]] = {
    "open_the_middle_drawer_of_the_cabinet": open_the_middle_drawer,
    "put_the_bowl_on_the_stove": put_the_bowl_on_the_stove,
    "put_the_wine_bottle_on_top_of_the_cabinet": put_the_wine_bottle_on_top_of_the_cabinet,
    "open_the_top_drawer_and_put_the_bowl_inside": open_the_top_drawer_and_put_the_bowl_inside,
    "put_the_bowl_on_top_of_the_cabinet": put_the_bowl_on_top_of_the_cabinet,
    "push_the_plate_to_the_front_of_the_stove": push_the_plate_to_the_front_of_the_stove,
    "put_the_cream_cheese_in_the_bowl": put_the_cream_cheese_in_the_bowl,
    "turn_on_the_stove": turn_on_the_stove,
    "put_the_bowl_on_the_plate": put_the_bowl_on_the_plate,
    "put_the_wine_bottle_on_the_rack": put_the_wine_bottle_on_the_rack,
}
