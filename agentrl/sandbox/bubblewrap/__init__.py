"""The backend ``bubblewrap``: namespaces, a cgroup and a seccomp filter per sandbox."""
