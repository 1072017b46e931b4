"""What ends a session on GCP when something goes wrong, and the latest second of it, written down before anything was played.

A row is one fault in one phase. `layer` is who must end it, by the evidence that it leaves: the account in Compute Engine's
delete operation, the `by` of the journal's `ended` line, the ledger. `within_s` counts from `of`, by the emulator's own
clock, until it holds no instance, disk or address of the session. Where another layer would act as well, the bound is
shorter than that layer needs: nothing here is saved by the hard cap.

What the figures are made of: the reaper's grace 420 s (core/audit.py GRACE) and 300 s for what is stopped (FRESH), its pause
180 s (core/guard.py EVERY_S); two empty lists 60 s apart, for the proof only; a deletion asked for again after 60 s
(engines/gcp.py AGAIN_S); SkyPilot's autodown 180 s and a tick of 60 s; the timer in the machine 30 s after the keeper's end and
at the latest with its next look, 60 s after it (engines/task.py AFTER_S), or 240 s after it last saw one
(scripts/deadline/arm.sh); 30 s for the deletion and for a busy host.
"""

from dataclasses import dataclass

SLACK = 30
REAPER = 420 + 180 + SLACK
STOPPED = 300 + 180 + SLACK
AUTODOWN = 3 * 60 + 60 + SLACK
TIMER = 60 + SLACK
ALONE = 240 + 60 + SLACK
AGAIN = 60

#: How often somebody looks at a session that could not be confirmed. Of a machine whose deletions all said DONE before it went,
#: nobody knows more exactly when that was. The same goes
#: for what vanishes. Set after the first runs, which were 20.1 and 16.1 s off.
LOOK = 20 + 2


@dataclass(frozen=True)
class Cell:
    """`key` is its name and that of what plays it. `hazards`: its numbers in the list of fifteen (notes/teardown.md)."""

    key: str
    fault: str
    phase: str
    hazards: tuple[int, ...]
    layer: str
    reason: str  # what the ledger says; "-" where no ledger knows of it
    within_s: float
    of: str
    kind: str = "wire"
    receipt_s: float = 1.0  # how far the receipt may be off Google's bill, per resource


#: No SkyPilot: the real controller, engine, place, sweep, reaper and timer against the emulator over HTTP. Time that somebody
#: sleeps away goes twenty times as fast.
WIRE = (
    # -- the launch
    Cell(
        "laptop-closed",
        "command and API server die, the insert was made",
        "launch",
        (1, 2),
        "reaper",
        "-",
        REAPER,
        "the label's deadline",
    ),
    Cell(
        "two-inserts",
        "a lost reply, then failover to the next zone; everybody dies",
        "launch",
        (2, 4),
        "reaper",
        "-",
        REAPER,
        "the label's deadline",
    ),
    Cell(
        "lost-reply",
        "the insert's reply is lost, the command lives",
        "launch",
        (4,),
        "command",
        "launch-failed",
        SLACK,
        "the lost reply",
    ),
    Cell(
        "ctrl-c",
        "Ctrl-C while the insert goes on for 60 s",
        "launch",
        (4,),
        "command",
        "launch-failed",
        60 + SLACK,
        "the Ctrl-C",
    ),
    Cell(
        "late-insert",
        "Ctrl-C; the request reaches Google 45 s later",
        "launch",
        (4,),
        "command",
        "launch-failed",
        45 + SLACK,
        "the Ctrl-C",
    ),
    Cell(
        "stockout",
        "no capacity in the first zone, the next one has some; then stop",
        "launch",
        (),
        "command",
        "user",
        SLACK,
        "the stop",
    ),
    Cell("stockout-everywhere", "no capacity anywhere", "launch", (), "Google", "launch-failed", 5, "the insert"),
    Cell(
        "quota-late", "quota exceeded, told by the operation", "launch", (), "Google", "launch-failed", 5, "the insert"
    ),
    Cell("quota-at-once", "quota exceeded, told by HTTP 403", "launch", (), "Google", "launch-failed", 5, "the insert"),
    Cell(
        "no-reaper",
        "the reaper's account may not delete: no heartbeat",
        "before the launch",
        (1,),
        "start",
        "-",
        0,
        "the start",
    ),
    # -- stop
    Cell(
        "record-removed",
        "SkyPilot has no record of it: `sky down` says that all is well",
        "stop",
        (13,),
        "command",
        "user",
        SLACK,
        "the stop",
    ),
    Cell("5xx", "four answers 503 in a row", "stop", (), "command", "user", SLACK, "the stop"),
    Cell(
        "outage",
        "Compute Engine is down for 900 s; unconfirmed meanwhile",
        "stop",
        (),
        "command",
        "user",
        900 + SLACK,
        "the stop",
    ),
    Cell(
        "delete-fails",
        "three deletions are accepted and fail",
        "stop",
        (),
        "command",
        "user",
        3 * AGAIN + SLACK,
        "the stop",
    ),
    Cell(
        "delete-lies",
        "two deletions say DONE and the machine stays",
        "stop",
        (),
        "command",
        "user",
        2 * AGAIN + SLACK,
        "the stop",
    ),
    Cell(
        "delete-lies-900s",
        "every deletion says DONE; the machine goes after 900 s; unconfirmed meanwhile",
        "stop",
        (),
        "Google",
        "user",
        900 + SLACK,
        "the stop",
        receipt_s=LOOK,
    ),
    Cell("delete-reply-lost", "the deletion's reply is lost", "stop", (4,), "command", "user", SLACK, "the stop"),
    Cell("stopping", "STOPPING lasts 60 s", "stop", (), "command", "user", 60 + SLACK, "the stop"),
    Cell(
        "zone-silent",
        "its zone is missing from the lists for 300 s",
        "stop",
        (),
        "command",
        "user",
        300 + SLACK,
        "the stop",
    ),
    Cell(
        "other-laptop",
        "the ledger is lost; a second laptop of the same owner stops it",
        "stop",
        (12,),
        "command",
        "user",
        SLACK,
        "the stop",
    ),
    # -- ready
    Cell("power-off", "the guest powers off; nobody looks", "ready", (11,), "reaper", "-", STOPPED, "the power-off"),
    Cell(
        "power-off-seen",
        "the guest powers off; a command looks",
        "ready",
        (11,),
        "command",
        "unguarded",
        SLACK,
        "the look",
    ),
    Cell("host-error", "host error on demand", "ready", (7,), "reaper", "-", STOPPED, "the host error"),
    Cell(
        "host-error-early",
        "host error on demand before restarts were forbidden: it comes back with nothing armed",
        "launch",
        (7,),
        "reaper",
        "-",
        REAPER,
        "the label's deadline",
    ),
    Cell("preempted", "taken back with 30 s of notice", "ready", (), "Google", "preempted", 30 + 5, "the notice"),
    Cell("vanished", "gone, and nothing was recorded", "ready", (), "Google", "vanished", 5, "the end"),
    Cell(
        "budget",
        "budget of a third of the hard cap; the price falls by half meanwhile; nothing in the machine acts",
        "ready",
        (15,),
        "reaper",
        "-",
        REAPER,
        "the budget's moment",
    ),
    # -- the reaper and sweep
    Cell(
        "reaper-zone-silent",
        "the zone does not answer until 900 s after the deadline: no heartbeat",
        "past the deadline",
        (2,),
        "reaper",
        "-",
        900 + 180 + SLACK,
        "the label's deadline",
    ),
    Cell(
        "reaper-outage",
        "Compute Engine is down when it looks",
        "past the deadline",
        (2,),
        "reaper",
        "-",
        180 + REAPER,
        "the label's deadline",
    ),
    Cell(
        "reaper-delete-fails",
        "two deletions are accepted and fail",
        "past the deadline",
        (2,),
        "reaper",
        "-",
        REAPER,
        "the label's deadline",
    ),
    Cell(
        "reaper-delete-lies",
        "one deletion says DONE and the machine stays",
        "past the deadline",
        (2,),
        "reaper",
        "-",
        REAPER,
        "the label's deadline",
    ),
    Cell(
        "sweep-others",
        "two owners, two ledgers: one's old machine goes, the other's live one and a decoy stay",
        "past the deadline",
        (12,),
        "sweep",
        "-",
        SLACK,
        "the sweep",
    ),
    Cell(
        "sweep-disk",
        "a boot disk without labels is left over",
        "after the end",
        (11, 13),
        "sweep",
        "-",
        SLACK,
        "the sweep",
    ),
    # -- the timer in the machine (node/deadline.py in a process of its own, looked at every second instead of every minute)
    Cell(
        "timer-deadline",
        "keeper, wrapper, autodown do nothing; its deadline comes",
        "ready",
        (5,),
        "timer",
        "-",
        SLACK,
        "the deadline",
    ),
    Cell(
        "ended-unseen",
        "the session ends by itself (exit code 10), and nobody looks until it is gone",
        "ready",
        (),
        "timer",
        "idle",
        SLACK,
        "the keeper's end",
    ),
    Cell(
        "ended-untold",
        "autodown deletes it, without a word, and nobody looks until it is gone",
        "ready",
        (),
        "autodown",
        "self-deleted",
        SLACK,
        "the deletion",
    ),
    Cell("timer-clock", "the machine's clock is two hours slow", "ready", (6,), "timer", "-", SLACK, "the uptime"),
    Cell(
        "timer-5xx",
        "its deletion is refused three times with 503, then one fails after it was accepted",
        "ready",
        (11,),
        "timer",
        "-",
        60 + SLACK,
        "the deadline",
    ),
    Cell(
        "timer-denied",
        "it may not delete itself: it powers off, and the reaper deletes",
        "ready",
        (11,),
        "reaper",
        "-",
        STOPPED + SLACK,
        "the deadline",
    ),
)

#: Through real SkyPilot in the world. Several are played at a time; the seconds are real.
FULL = (
    Cell(
        "full-laptop-closed",
        "kill -9 of command and API server before the keeper began",
        "launch",
        (1, 2),
        "reaper",
        "-",
        REAPER,
        "the label's deadline",
        "full",
    ),
    Cell(
        "full-ctrl-c",
        "Ctrl-C before the keeper began",
        "launch",
        (4,),
        "command",
        "launch-failed",
        90,
        "the Ctrl-C",
        "full",
    ),
    Cell(
        "full-lost-reply",
        "the insert's reply is lost on the way to SkyPilot",
        "launch",
        (4,),
        "command",
        "-",
        300,
        "the lost reply",
        "full",
    ),
    Cell(
        "full-keeper-killed",
        "kill -9 of the keeper, whose engine prints on",
        "ready",
        (3,),
        "wrapper",
        "keeper-died",
        5 + TIMER,
        "the kill",
        "full",
    ),
    Cell(
        "full-wrapper-killed",
        "kill -9 of wrapper and keeper at once",
        "ready",
        (3,),
        "timer",
        "wrapper-died",
        5 + TIMER,
        "the kill",
        "full",
    ),
    Cell(
        "full-skylet-killed",
        "kill -9 of skylet and the keeper",
        "ready",
        (5,),
        "timer",
        "keeper-died",
        5 + TIMER,
        "the kill",
        "full",
    ),
    Cell(
        "full-disk",
        "its disk is full, to the last byte",
        "ready",
        (5,),
        "timer",
        "idle",
        75 + 10 + TIMER,
        "the last request",
        "full",
    ),
    Cell(
        "full-disk-stays",
        "what its end frees is filled at once: its timer cannot be armed anew",
        "ready",
        (5,),
        "timer",
        "unguarded",
        75 + 10 + ALONE,
        "the last request",
        "full",
    ),
    Cell("full-reboot", "it reboots", "ready", (6,), "timer", "unguarded", ALONE, "the boot", "full"),
    Cell(
        "full-clock",
        "btime moves by 100 s: autodown is disarmed",
        "ready",
        (6,),
        "timer",
        "idle",
        75 + 10 + TIMER,
        "the last request",
        "full",
    ),
    Cell(
        "full-stalled",
        "the engine hangs (SIGSTOP)",
        "ready",
        (8,),
        "keeper",
        "unknown-too-long",
        20 + TIMER,
        "the stop signal",
        "full",
    ),
    Cell(
        "full-other-job",
        "`sky exec sleep inf` holds the queue",
        "ready",
        (9,),
        "timer",
        "idle",
        75 + 10 + TIMER,
        "the last request",
        "full",
    ),
    Cell(
        "full-timer-off",
        "its own timer is taken away",
        "ready",
        (5,),
        "autodown",
        "idle",
        75 + 10 + AUTODOWN,
        "the last request",
        "full",
    ),
    Cell(
        "full-ssh-open",
        "an ssh session stays open and says nothing",
        "ready",
        (10,),
        "keeper",
        "idle",
        75 + 10 + TIMER,
        "the last request",
        "full",
    ),
    Cell(
        "full-power-off",
        "the guest powers off; no command runs",
        "ready",
        (11,),
        "reaper",
        "-",
        STOPPED + 60,
        "the power-off",
        "full",
    ),
    Cell(
        "full-record-removed",
        "SkyPilot's record of it is deleted, then `kimisession stop`",
        "stop",
        (13,),
        "command",
        "user",
        60,
        "the stop",
        "full",
    ),
    Cell(
        "full-preempted", "taken back with 30 s of notice", "ready", (), "Google", "preempted", 35, "the notice", "full"
    ),
    Cell(
        "full-vanished",
        "gone, and nothing was recorded; a command looks at once",
        "ready",
        (),
        "Google",
        "vanished",
        5,
        "the end",
        "full",
        receipt_s=LOOK,
    ),
    Cell(
        "full-stockout",
        "no capacity in the first zone; ready in the next one, then stop",
        "launch",
        (),
        "command",
        "user",
        90,
        "the stop",
        "full",
    ),
)

CELLS = (*WIRE, *FULL)

#: Held elsewhere, or by nothing here.
ELSEWHERE = {
    "seeding VM (14)": "tests/rigs/gce/test_seed_vm.py shows every layer armed on it; it carries a session's labels, so the "
    "reaper's rows above hold for it; no fault was played on it",
    "unfinished uploads, soft-deleted objects (14)": "tests/weights; not part of this matrix",
    "every phase of a start x every process killed": "notes/kill-matrix.md: the same wrapper, keeper and engine",
}
