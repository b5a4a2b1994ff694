#!/bin/bash
# Runs once, as root, when a node starts for the first time. CloudFormation fills in the numbers.
minutes=${StopAfterMinutes}
first_port=${FirstPort}
last_port=${LastPort}

# The end of the node's life is a point in time, so that a restart doesn't move it. Were it missed
# while the node was off, the node would stop as soon as it is on again.
end=$(date -u -d "+$minutes minutes" '+%Y-%m-%d %H:%M:%S UTC')
units=$PACELINE_ROOT/etc/systemd/system
cat >"$units/paceline-stop.service" <<UNIT
[Unit]
Description=End of this node's life
[Service]
Type=oneshot
ExecStart=/usr/bin/systemctl poweroff
UNIT
cat >"$units/paceline-stop.timer" <<UNIT
[Unit]
Description=End of this node's life
[Timer]
OnCalendar=$end
AccuracySec=1s
Persistent=true
[Install]
WantedBy=timers.target
UNIT
systemctl daemon-reload
systemctl enable --now paceline-stop.timer || shutdown -h "+$minutes"

# Gloo and NCCL take the ports that the kernel gives them: it gives those that the security group
# lets through.
settings=$PACELINE_ROOT/etc/sysctl.d/90-paceline.conf
echo "net.ipv4.ip_local_port_range = $first_port $last_port" >"$settings"
sysctl -p "$settings"
