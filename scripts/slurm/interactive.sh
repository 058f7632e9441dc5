#!/usr/bin/env bash
# Get nodes to work on by hand:
#
#   scripts/slurm/interactive.sh --account=ACCOUNT --partition=PARTITION
#
# opens a shell that holds two nodes for half an hour. In it, `mpitp launch` starts its ranks on these nodes:
#
#   mpitp launch -- doctor                       are all ranks there, and on which hosts?
#   mpitp launch -- train run.toml               as many ranks as were asked for
#   mpitp launch -n 3 -- generate --model DIR --prompt Hello
#   mpitp launch --dry-run -- train run.toml     only show the command
#   exit                                         give the nodes back
#
# The arguments are options of salloc, which replace those below, and may end with a command to run instead of a shell:
#
#   scripts/slurm/interactive.sh --nodes=1 --gpus-per-node=4 --time=00:10:00 mpitp launch -- doctor
set -euo pipefail

# Two nodes with four ranks (MPI processes) each, four cores for each rank, for half an hour.
exec salloc --job-name=mpitp-interactive --nodes=2 --ntasks-per-node=4 --cpus-per-task=4 --time=00:30:00 "$@"
