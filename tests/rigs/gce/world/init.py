"""STAND-IN for systemd and Google's guest agent: process 1 of a pretended machine. Standard library, runs alone.

At every boot: what ldconfig and the kernel's modules need, the user's keys and `startup-script` from the metadata server
(the script in the background, its output in /var/log/startup-script.log), sshd, and from then on the enabled timers.
RTMIN+4 (38) powers the machine off, RTMIN+5 (39) reboots it, as with systemd; the exit code says which.
"""

import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

HOME = Path("/home/gcpuser")
UNITS = Path("/etc/systemd/system")
ACTIVE = Path("/run/timers")
CA = "/etc/ssl/certs/ca-certificates.crt"
#: What /etc/environment tells every process of the machine.
ENV = {
    "MACHINE": "/var/lib/machine",
    "UV_OFFLINE": "1",
    **dict.fromkeys(("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "HTTPLIB2_CA_CERTS", "CURL_CA_BUNDLE"), CA),
}


def metadata(path: str) -> str:
    """A value of the metadata server; empty when it has none. It is asked until it answers."""
    url = f"http://169.254.169.254/computeMetadata/v1/{path}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    while True:
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return ""
            print(f"metadata {path}: {error}", flush=True)
        except OSError as error:
            print(f"metadata {path}: {error}", flush=True)
        time.sleep(0.5)


def start(name: str, argv: list[str], env: dict[str, str] | None = None) -> "subprocess.Popen[bytes]":
    """Start a service; its output is appended to /var/log/NAME.log."""
    with Path(f"/var/log/{name}.log").open("ab") as log:
        return subprocess.Popen(
            argv,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
        )


def run_sshd() -> None:
    """For the one user, in a user namespace where he has the id that he has on Google's images."""
    Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").write_text("0")
    if not Path("/etc/ssh/host_key").exists():
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "/etc/ssh/host_key"], check=True)
    # PAM would read it for sshd.
    Path("/etc/environment").write_text("".join(f"{key}={value}\n" for key, value in ENV.items()))
    env = "".join(f' "{key}={value}"' for key, value in ENV.items())
    Path("/etc/ssh/environment.conf").write_text(f"SetEnv PATH={os.environ['PATH']}{env}\n")
    start("sshd", ["unshare", "--user", "--map-user=1001", "--map-group=1001", "/usr/sbin/sshd", "-D", "-e"])


def accept_keys() -> None:
    """`ssh-keys` of the metadata, USER:KEY lines, for the one user."""
    lines = metadata("instance/attributes/ssh-keys").splitlines()
    keys = [line.partition(":")[2] for line in lines if line.startswith("gcpuser:")]
    folder = HOME / ".ssh"
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / "authorized_keys").write_text("\n".join([*keys, ""]))


def run_startup_script() -> None:
    """As Google's guest agent does: at every boot, as root, not waited for."""
    text = metadata("instance/attributes/startup-script")
    if text:
        script = Path("/run/startup-script")
        script.write_text(text)
        script.chmod(0o755)
        start("startup-script", [str(script)] if text.startswith("#!") else ["/bin/bash", str(script)])


class Timer:
    """An active timer: OnBootSec, OnUnitInactiveSec and OnCalendar=minutely, by the clock since the boot and the calendar."""

    def __init__(self, name: str) -> None:
        self.name = name
        timer = self._unit(name)
        self.service = timer.get("Unit", name.replace(".timer", ".service"))
        boot_s = timer.get("OnBootSec", "").rstrip("s")
        self.next_at = float(boot_s) if boot_s else None
        after_s = timer.get("OnUnitInactiveSec", "").rstrip("s")
        self.after_s = float(after_s) if after_s else None
        self.minutely = timer.get("OnCalendar") == "minutely"
        self.minute = int(time.time() // 60)
        self.process: subprocess.Popen[bytes] | None = None

    @staticmethod
    def _unit(name: str) -> dict[str, str]:
        return dict(re.findall(r"^(\w+)=(.*)$", (UNITS / name).read_text(), re.MULTILINE))

    def tick(self, uptime_s: float) -> None:
        """Start the service when it is due and does not run."""
        if self.process is not None:
            if self.process.poll() is None:
                return
            self.process = None
            self.next_at = uptime_s + self.after_s if self.after_s is not None else None
        minute = int(time.time() // 60)
        due = (self.next_at is not None and uptime_s >= self.next_at) or (self.minutely and minute != self.minute)
        if due:
            self.minute, self.next_at = minute, None
            unit = self._unit(self.service)
            env = dict(pair.split("=", 1) for pair in unit.get("Environment", "").split() if "=" in pair)
            self.process = start(self.service, unit["ExecStart"].split(), env)


def run_timers(timers: dict[str, Timer]) -> None:
    """Look once at what is active, and start what is due."""
    active = {path.name for path in ACTIVE.iterdir()}
    for name in set(timers) - active:
        del timers[name]
    for name in active:
        try:
            timers.setdefault(name, Timer(name) if name not in timers else timers[name])
            timers[name].tick(time.clock_gettime(time.CLOCK_BOOTTIME))
        except (OSError, KeyError, ValueError) as error:
            print(f"{name}: {error}", flush=True)


def reap(timers: dict[str, Timer]) -> None:
    """Bury orphans; children that a timer waits for are its own business."""
    own = {timer.process.pid for timer in timers.values() if timer.process is not None}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in own:
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] == "Z" and fields[1] == "1":
                    os.waitpid(int(entry.name), os.WNOHANG)
            except OSError:
                continue


def main() -> None:
    """Boot, then keep timers until somebody ends the machine."""
    for number in (38, 39):
        signal.signal(number, lambda number, _: os._exit(0 if number == 38 else number))
    os.environ.update(ENV)
    subprocess.run(["ldconfig"], check=False)
    for module in ("nvidia_drm", "nvidia_uvm"):
        subprocess.run(["modprobe", module], check=False)
    accept_keys()
    run_sshd()
    run_startup_script()
    for link in (UNITS / "timers.target.wants").glob("*.timer"):
        (ACTIVE / link.name).touch()
    print("booted", flush=True)
    timers: dict[str, Timer] = {}
    while True:
        run_timers(timers)
        reap(timers)
        time.sleep(0.5)


if __name__ == "__main__":
    main()
