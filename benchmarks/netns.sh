#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Simulate two hosts on one machine: two network namespaces joined by a rate-limited link, one rank in each, with Gloo.
# With --ranks-per-host, the ranks of
# a host are in one PID namespace, so that they can share memory, as in a container.
#
#   benchmarks/netns.sh [--links "1gbit/0 4gbit/0"] [--script ddp] [--ranks-per-host 1]
#                       [ARGUMENT of the script ...]
#
# A link is RATE/DELAY in tc's notation. DELAY (0, or a number of ms) is that of one direction. Frames are jumbo frames of
# 9000 bytes. Needs root, ip and tc (iproute2) and the kernel's veth and tbf, for a delay also netem. Creates the
# namespaces apex-a-PID and apex-b-PID and removes them at the end. PYTHON selects the interpreter (default: python3).
# Takes about two minutes per link.
set -euo pipefail

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
python=${PYTHON:-python3}
links="1gbit/0 4gbit/0"
mtu=9000
script=ddp
ranks=1
arguments=()
fail() {
  echo "netns.sh: $*" >&2
  exit 1
}
while [ $# -gt 0 ]; do
  case $1 in
    --links | --script | --ranks-per-host) [ $# -ge 2 ] || fail "$1 needs a value." ;;&
    --links) links=$2; shift 2 ;;
    --script) script=$2; shift 2 ;;
    --ranks-per-host) ranks=$2; shift 2 ;;
    -h | --help) sed -n '3,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) arguments+=("$1"); shift ;;
  esac
done
# The command to record, without the folder, which is a path of this machine.
command="benchmarks/netns.sh --links '$links'"
[ "$script" = ddp ] || command+=" --script $script"
[ "$ranks" = 1 ] || command+=" --ranks-per-host $ranks"
command+="${arguments[*]:+ ${arguments[*]}}"
if [ ${#arguments[@]} -eq 0 ] && [ "$script" = ddp ]; then
  # As many rounds as fit into the seconds: a step takes 0.2 s on one link and 2 s on another.
  arguments=(--models resnet18 --variants torch apex apex_group --rounds 40 --warmup 2 --seconds 120)
fi

[ -f "$here/$script.py" ] || fail "there is no benchmark '$script'."
[ "$(id -u)" = 0 ] || fail "making network namespaces needs root: run it with sudo."
for tool in ip tc; do
  command -v "$tool" >/dev/null || fail "there is no '$tool' here: install iproute2."
done
"$python" -c 'import apex.parallel' || fail "$python cannot import apex.parallel: set PYTHON, or install apex-parallel."

a=apex-a-$$ b=apex-b-$$
children=()
# shellcheck disable=SC2317,SC2329  # called by the trap
cleanup() {
  for child in "${children[@]}"; do kill "$child" 2>/dev/null || true; done
  ip netns del "$a" 2>/dev/null || true
  ip netns del "$b" 2>/dev/null || true
}
trap cleanup EXIT
trap 'exit 130' INT TERM

ip netns add "$a" || fail "this kernel or container does not allow network namespaces."
ip netns add "$b"
for namespace in "$a" "$b"; do ip -n "$namespace" link set lo up; done

join_hosts() { # join_by_veth RATE DELAY
  ip -n "$a" link add link0 type veth peer name link0 netns "$b" || fail "this kernel has no veth."
  ip -n "$a" addr add 10.99.0.1/24 dev link0
  ip -n "$b" addr add 10.99.0.2/24 dev link0
  for namespace in "$a" "$b"; do ip -n "$namespace" link set link0 mtu "$mtu" up; done
  for namespace in "$a" "$b"; do
    # Segments of 64 KB would pass the rate limit in bursts that no real link has.
    ip netns exec "$namespace" ethtool -K link0 tso off gso off gro off >/dev/null 2>&1 ||
      echo "netns.sh: no ethtool: packets of up to 64 KB will pass the rate limit in lumps"
    if [ "$2" = 0 ]; then
      tc -n "$namespace" qdisc add dev link0 root tbf rate "$1" burst 64kb latency 50ms ||
        fail "tc could not limit the rate to $1: the kernel lacks the queue discipline tbf."
    else
      tc -n "$namespace" qdisc add dev link0 root netem delay "$2" rate "$1" limit 10000 ||
        fail "a delay needs the queue discipline netem, which the kernel lacks."
    fi
  done
}

host_in() { # host_in NAMESPACE FIRST_RANK NAME LINK; status and output are those of its first rank
  # shellcheck disable=SC2016  # for the inner shell
  exec ip netns exec "$1" env FIRST="$2" RANKS="$ranks" WORLD_SIZE=$((2 * ranks)) MASTER_ADDR=10.99.0.1 \
    MASTER_PORT=29541 GLOO_SOCKET_IFNAME=link0 BENCHMARK_COMMAND="$command" \
    OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" unshare --pid --fork --kill-child --mount-proc bash -c '
      for ((rank = FIRST + 1; rank < FIRST + RANKS; ++rank)); do RANK=$rank "$@" >/dev/null & done
      RANK=$FIRST "$@" || exit
      wait' host \
    "$python" "$here/$script.py" --name "$3" --link "$4" "${arguments[@]}"
}

# Wait at most three minutes. Otherwise the remaining load of the last link would count as another program's, and the next
# results would be marked as provisional.
let_load_fall() {
  local tries
  for ((tries = 0; tries < 36; ++tries)); do
    awk '{ exit $1 > 0.5 }' /proc/loadavg && return
    sleep 5
  done
}

status=0
set -f
for link in $links; do
  [ "$link" = "${links%% *}" ] || let_load_fall
  rate=${link%/*} delay=${link#*/}
  name=netns-$rate
  [ "$delay" = 0 ] || name+=-$delay
  [ "$script" = ddp ] || name+=-$script
  [ "$ranks" = 1 ] || name+=-${ranks}ranks
  join_hosts "$rate" "$delay"
  described="$rate, delay $delay each way, MTU $mtu"
  echo "== link: $described"
  ip netns exec "$a" ping -q -c 20 -i 0.01 10.99.0.2 2>/dev/null | tail -1 || true
  host_in "$b" "$ranks" "$name" "$described" >/dev/null & # rank 0 prints the results
  children=($!)
  (host_in "$a" 0 "$name" "$described") || status=$?
  wait "${children[0]}" || status=$?
  children=()
  ip -n "$a" link del link0 2>/dev/null || true
done
exit "$status"
