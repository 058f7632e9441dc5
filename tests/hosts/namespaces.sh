# Shared by tests/hosts/run and scripts/bench_hosts: what hosts made of network namespaces need. Source it after
# scripts/common.sh. Sets `inside`, the command in front of one that makes hosts: networks, mounts and processes of its
# own, which are gone when it has ended.
# shellcheck shell=bash

skip() { # skip WHAT WHY...: leave without a failure, aloud
    local what=$1
    shift
    say "ATTENTION: $what: SKIPPED, nothing of it ran: $*"
    exit 0
}

install_ip() {
    command -v apt-get >/dev/null || return 1
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends iproute2; } >&2
}

need_hosts() { # need_hosts WHAT: return when this machine can make hosts, else skip WHAT
    PATH=$PATH:/usr/sbin:/sbin
    [ "$(id -u)" = 0 ] || skip "$1" "only root can make hosts"
    command -v ip >/dev/null || install_ip || skip "$1" "Debian's package iproute2 can't be installed"
    inside=(unshare --net --mount --pid --fork --kill-child --mount-proc)
    mkdir -p /run/netns
    "${inside[@]}" sh -c 'mount -t tmpfs none /run/netns && ip netns add try && ip link add try-bridge type bridge &&
        ip link add try-veth type veth peer name eth0 netns try && ip netns exec try unshare --uts hostname try' ||
        skip "$1" "this machine makes no network namespaces"
}

need_slow_links() { # need_slow_links WHAT: return when a link's rate can be limited, else skip WHAT
    "${inside[@]}" tc qdisc add dev lo root tbf rate 1gbit burst 128k latency 20ms ||
        skip "$1" "this kernel limits no link (module sch_tbf)"
}
