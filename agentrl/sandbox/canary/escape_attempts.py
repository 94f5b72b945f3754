"""The canary's attempts to reach what is outside of a sandbox. The text runs inside: standard library only."""

ESCAPE_ATTEMPTS = r'''
import ctypes, errno, json, os, platform, socket
targets = json.loads(r"""@TARGETS@""")
libc = ctypes.CDLL(None, use_errno=True)
rows = []

def attempt(defence, title, action):
    """An OSError stops an attempt; if it returns, the result is what it reached."""
    try:
        got = action()
    except OSError as error:
        rows.append([defence, title, True, errno.errorcode.get(error.errno, str(error))])
    else:
        rows.append([defence, title, False, str(got)[:60]])

def refuse(defence, title, action):
    """As attempt, for system calls with harmless arguments: an error other than a refusal means that the kernel
    executed the call."""
    def executed():
        try:
            return action()
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EAFNOSUPPORT):
                raise
            return "executed: " + errno.errorcode.get(error.errno, str(error))
    attempt(defence, title, executed)

def call(name, *arguments):
    ctypes.set_errno(0)
    if getattr(libc, name)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), name)
    return "possible"

def syscall(number, *arguments):
    return call("syscall", ctypes.c_long(number), *arguments)

def connect(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as one:
        one.settimeout(2)
        one.connect(address)
    return "connected"

def make_socket(family, kind, protocol=0):
    socket.socket(family, kind, protocol).close()
    return "made"

def write(path):
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
    os.unlink(path)
    return "written"

def open_to_write(path):
    os.close(os.open(path, os.O_WRONLY))
    return "opened"

def signal_server():
    os.kill(targets["server_pid"], 0)
    # The id may be that of another process in the sandbox: what counts is whether it is the server.
    with open("/proc/%d/cmdline" % targets["server_pid"]) as file:
        command = file.read()
    if "snippet" in command or targets["server_pid"] in (1, os.getpid()):
        raise ProcessLookupError(errno.ESRCH, "another process")
    return command

def list_home(folder):
    """Return a file of the server's home that the sandbox should not show; empty if there is none."""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        is_shown = path in targets["shown"]
        leads_to_shown = any(shown.startswith(path + "/") for shown in targets["shown"])
        private = "" if is_shown else list_home(path) if leads_to_shown else path
        if private:
            return private
    return ""

def nothing():
    raise OSError(errno.ENOENT, "nothing")

def peek(path):
    with open(path, "rb", buffering=0) as file:
        if path.endswith("mem"):
            return "opened"
        return file.read(40) or "opened"

def status(field):
    with open("/proc/self/status") as file:
        return next(line.split(":")[1].strip() for line in file if line.startswith(field + ":"))

def expect(defence, title, good, result):
    rows.append([defence, title, bool(good), str(result)[:60]])

arm = platform.machine() == "aarch64"
runner = os.getppid()
capabilities = status("CapEff")  # in a user namespace, which an attempt may get, a process has them all
buffer = ctypes.create_string_buffer(256)
attempt("files", "read /etc/shadow", lambda: peek("/etc/shadow"))
attempt("files", "list the server's home", lambda: list_home(targets["home"]) or nothing())
attempt("files", "write to /usr", lambda: write("/usr/agentrl-canary"))
attempt("files", "write to /", lambda: write("/agentrl-canary"))
attempt("files", "write to /proc/sys", lambda: open_to_write("/proc/sys/kernel/core_pattern"))
attempt("network", "connect to the machine's loopback", lambda: connect(socket.AF_INET, ("127.0.0.1", targets["port"])))
attempt("network", "connect to an abstract socket", lambda: connect(socket.AF_UNIX, targets["abstract"]))
attempt("process_namespace", "signal the server", signal_server)
attempt("runner", "open the runner's memory", lambda: peek("/proc/%d/mem" % runner))
attempt("runner", "list the runner's files", lambda: os.listdir("/proc/%d/fd" % runner))
refuse("seccomp", "a vsock socket", lambda: make_socket(40, socket.SOCK_STREAM))
refuse("seccomp", "a netlink socket", lambda: make_socket(16, socket.SOCK_RAW))
refuse("seccomp", "a kernel crypto socket", lambda: make_socket(38, socket.SOCK_SEQPACKET))
refuse("seccomp", "io_uring_setup", lambda: syscall(425, ctypes.c_uint(4), buffer))
refuse("seccomp", "ptrace", lambda: call("ptrace", 0, 0, 0, 0))
refuse("seccomp", "a user namespace", lambda: call("unshare", 0x10000000))
refuse("seccomp", "mount", lambda: call("mount", None, None, None, 0, None))
refuse("seccomp", "bpf", lambda: syscall(280 if arm else 321, 0, buffer, 48))
refuse("seccomp", "a kernel keyring", lambda: syscall(219 if arm else 250, 0, -3, 0))
refuse("seccomp", "userfaultfd", lambda: syscall(282 if arm else 323, 1))
refuse("seccomp", "perf_event_open", lambda: syscall(241 if arm else 298, buffer, 0, -1, -1, 0))
attempt("privileges", "become root", lambda: call("setuid", 0) if os.getuid() else "is root")
expect("privileges", "hold a capability", int(capabilities, 16) == 0, capabilities)
expect("privileges", "gain privileges by a setuid program", status("NoNewPrivs") == "1", "NoNewPrivs " + status("NoNewPrivs"))
unexpected = sorted(set(os.environ) - {"PATH", "HOME", "LANG", "LC_CTYPE", "TMPDIR", "PWD", "HOSTNAME", "TERM", "SHLVL", "_",
                                    "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "NO_PROXY", "no_proxy"})
expect("environment", "read the server's environment", not unexpected, " ".join(unexpected) or "nothing of it")
if targets["kernel"] is not None:
    release = os.uname().release
    expect("kernel", "run on the machine's kernel", release != targets["kernel"], "kernel " + release)
print(json.dumps(rows))
'''
"""Prints rows ``[defence, attempt, held, result]`` as JSON. ``@TARGETS@`` is replaced by the targets outside."""
