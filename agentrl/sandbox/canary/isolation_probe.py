"""What the canary tries to reach from inside a sandbox; the text runs there, so it imports nothing of ours."""

ISOLATION_PROBE = r'''
import ctypes, errno, json, os, platform, socket
targets = json.loads(r"""@TARGETS@""")
libc = ctypes.CDLL(None, use_errno=True)
rows = []

def attempt(defence, words, action):
    """An attempt is stopped by an OSError; whatever it returns is what it reached."""
    try:
        got = action()
    except OSError as error:
        rows.append([defence, words, True, errno.errorcode.get(error.errno, str(error))])
    else:
        rows.append([defence, words, False, str(got)[:60]])

def refuse(defence, words, action):
    """As attempt, for system calls that are tried with arguments that can do no harm: any other error means that the
    kernel would have listened."""
    def listened():
        try:
            return action()
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EAFNOSUPPORT):
                raise
            return "listened: " + errno.errorcode.get(error.errno, str(error))
    attempt(defence, words, listened)

def called(name, *arguments):
    ctypes.set_errno(0)
    if getattr(libc, name)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), name)
    return "possible"

def syscalled(number, *arguments):
    return called("syscall", ctypes.c_long(number), *arguments)

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
    # The number may be one of ours: what counts is whether it is the server.
    with open("/proc/%d/cmdline" % targets["server_pid"]) as file:
        words = file.read()
    if "snippet" in words or targets["server_pid"] in (1, os.getpid()):
        raise ProcessLookupError(errno.ESRCH, "another process")
    return words

def peek(path):
    with open(path, "rb", buffering=0) as file:
        if path.endswith("mem"):
            return "opened"
        return file.read(40) or "opened"

def status(field):
    with open("/proc/self/status") as file:
        return next(line.split(":")[1].strip() for line in file if line.startswith(field + ":"))

def expect(defence, words, good, said):
    rows.append([defence, words, bool(good), str(said)[:60]])

arm = platform.machine() == "aarch64"
runner = os.getppid()
buffer = ctypes.create_string_buffer(256)
attempt("files", "read /etc/shadow", lambda: peek("/etc/shadow"))
attempt("files", "list the server's home", lambda: os.listdir(targets["home"]))
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
refuse("seccomp", "io_uring_setup", lambda: syscalled(425, ctypes.c_uint(4), buffer))
refuse("seccomp", "ptrace", lambda: called("ptrace", 0, 0, 0, 0))
refuse("seccomp", "a user namespace", lambda: called("unshare", 0x10000000))
refuse("seccomp", "mount", lambda: called("mount", None, None, None, 0, None))
refuse("seccomp", "bpf", lambda: syscalled(280 if arm else 321, 0, buffer, 48))
refuse("seccomp", "a kernel keyring", lambda: syscalled(219 if arm else 250, 0, -3, 0))
refuse("seccomp", "userfaultfd", lambda: syscalled(282 if arm else 323, 1))
refuse("seccomp", "perf_event_open", lambda: syscalled(241 if arm else 298, buffer, 0, -1, -1, 0))
attempt("privileges", "become root", lambda: called("setuid", 0) if os.getuid() else "is root")
expect("privileges", "hold a capability", int(status("CapEff"), 16) == 0, status("CapEff"))
expect("privileges", "gain privileges by a setuid program", status("NoNewPrivs") == "1", "NoNewPrivs " + status("NoNewPrivs"))
strange = sorted(set(os.environ) - {"PATH", "HOME", "LANG", "LC_CTYPE", "TMPDIR", "PWD", "HOSTNAME", "TERM", "SHLVL", "_",
                                    "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "NO_PROXY", "no_proxy"})
expect("environment", "read the server's environment", not strange, " ".join(strange) or "nothing of it")
print(json.dumps(rows))
'''
"""Prints rows ``[defence, attempt, held, what it met]`` as JSON. ``@TARGETS@`` is replaced by what waits outside."""
