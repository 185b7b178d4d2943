#!/usr/bin/env bash
# Runs short trainings with the oldest core packages that pyproject.toml allows, then with the newest, each in an environment of
# its own below FOLDER (default build/bounds). PyTorch is the pinned one; TORCH=2.7.1 chooses another (gigabytes on Linux).
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD folder=${1:-build/bounds} torch=${TORCH:-$(sed -n 's/^torch==//p' constraints.txt)}
mkdir -p "$folder"; folder=$(cd "$folder" && pwd)
export OMP_NUM_THREADS=1
for which in oldest newest; do
  python3 -m venv "$folder/$which"
  bin=$folder/$which/bin
  names=$("$bin/python" - "$which" <<'P'
import re, sys, tomllib
for need in tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]:
    name, bound = re.match(r"([\w-]+)>=([\w.]+)", need).groups()
    print("" if name == "torch" else f"{name}=={bound}" if sys.argv[1] == "oldest" else name)
P
)
  "$bin/pip" install -q --disable-pip-version-check "torch==$torch" $names
  "$bin/pip" install -q --disable-pip-version-check --no-deps "$root"
  work=$(mktemp -d "$folder/$which-XXXX"); cd "$work"
  while read -r words; do
    echo "$which: surefoot $words"
    "$bin/surefoot" $words > last.log 2>&1 || { tail -3 last.log; exit 1; }
  done <<'C'
train CartPole-v1 --steps 2000 --name low
resume runs/low --steps 4000
train CartPole-v1 --steps 4000 --name whole
evaluate runs/low --episodes 5 --json
check CartPole-v1
list
compare runs/low runs/whole
export runs/low --format torch
train tensor/CartPole-v1 --steps 4000 --name tensors
train CartPole-v1 --steps 2000 --name ranks --ranks 2
train CartPole-v1 --steps 2000 --name workers --rollout.backend workers --rollout.environments 4
train Pendulum-v1 --steps 2000 --name pendulum
C
  cd "$root"
done
echo "all short trainings passed with the oldest and the newest versions, PyTorch $torch"
