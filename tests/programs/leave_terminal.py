"""Runs a command in a terminal that goes away: leave_terminal.py COMMAND... Prints how it ended, or `goes on`.

The terminal is closed once the command has written to it, as when an ssh session breaks off.
"""

import os
import pty
import sys
import time

pid, terminal = pty.fork()
if pid == 0:
    os.environ["TERM"] = "xterm"
    os.execv(sys.argv[1], sys.argv[1:])
os.read(terminal, 1)
time.sleep(0.5)
os.close(terminal)
until = time.monotonic() + 20
while time.monotonic() < until:
    ended, status = os.waitpid(pid, os.WNOHANG)
    if ended:
        print("ended", os.waitstatus_to_exitcode(status))
        sys.exit()
    time.sleep(0.05)
os.kill(pid, 9)
print("goes on")
