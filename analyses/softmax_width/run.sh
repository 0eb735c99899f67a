#!/usr/bin/env bash
# The whole grid: 3 widths x (gamma 0, .25, .5, and the fixed margin at .5) x 3 seeds = 36 runs of 93 steps. Give it again to continue.
# The widths go into one folder each, so that two processes can share the work: run.sh 16 & run.sh 32 128
set -euo pipefail
cd "$(dirname "$0")/../.."
gradscope=${GRADSCOPE:-.venv/bin/gradscope}
declare -A width=([16]="16+8+narrow" [32]="32+4+narrow" [128]="128+1+none")
for w in "${@:-16 32 128}"; do
  for one in $w; do
    "$gradscope" sweep analyses/softmax_width/recipe.toml \
      --over "train.batch_size+train.accumulate+train.accumulate_mode=${width[$one]}" \
      --over "objective.gamma+objective.margin=0+live,.25+live,.5+live,.5+fixed" \
      --seeds 3 --output "runs/softmax_width/$one"
  done
done
