"""A SLURM job for a layout on a machine: as many nodes as its ranks fill."""

from __future__ import annotations

import shlex

from mpitp.plan.layout import Layout
from mpitp.plan.machine_file import Machine


def job_text(layout: Layout, machine: Machine, run_file: str) -> str:
    """What sbatch takes. Account and partition are the caller's to name on its command line."""
    nodes = -(-layout.ranks // machine.machine.ranks_per_node)
    tasks = -(-layout.ranks // nodes)
    cores = max(1, machine.machine.cores_per_node // machine.machine.ranks_per_node)
    is_gpu = machine.machine.device == "gpu"
    lines = [
        "#!/bin/bash",
        f"# {layout}: {layout.ranks} ranks of {machine.machine.name.encode('ascii', 'replace').decode()}",
        "# Submit it from the folder that the paths in the run file are relative to, with mpitp's environment active:",
        "#   sbatch --account=ACCOUNT --partition=PARTITION THIS_FILE",
        "#SBATCH --job-name=mpitp-train",
        "#SBATCH --output=%x-%j.out",
        f"#SBATCH --nodes={nodes}",
        f"#SBATCH --ntasks={layout.ranks}",
        f"#SBATCH --ntasks-per-node={tasks}",
        f"#SBATCH --cpus-per-task={cores}",
        *([f"#SBATCH --gpus-per-node={tasks}"] if is_gpu else []),
        "#SBATCH --time=02:00:00",
        "",
        "set -euo pipefail",
        "# srun doesn't inherit the job's --cpus-per-task (since SLURM 22.05): say it again.",
        "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK",
        f"mpitp launch -- train {shlex.quote(run_file)} --resume auto{' --set train.device=gpu' if is_gpu else ''}",
    ]
    return "\n".join(lines) + "\n"
