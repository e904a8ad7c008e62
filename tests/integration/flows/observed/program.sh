#!/bin/sh
# What a program sees that is no Python.
printf '<%s>' "$0" "$@"
printf '\n'
env | grep -v -E '^(MASTER_PORT|TORCHRUN_AGENT_PID|_)=' | sort
grep -E '^(Umask|Sig[BIC]|Shd|Cap|NoNew|Cpus_allowed_list|Threads)' /proc/self/status
ls -l /proc/self/fd | sed 's/.* \([0-9]* -> \)/\1/' | grep -v -e ' -> /proc' -e total -e pipe
ulimit -a
pwd
cat
kill -USR2 $$
