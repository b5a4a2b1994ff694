"""`--sync signs`: the row that Paceline shows and checks. Imports no torch."""

from paceline.gradient_sync.registry import SyncEntry

ENTRY = SyncEntry(
    implementation="paceline_signs.majority:SignSync",
    help="a vote of the workers on each gradient's sign, a bit of what they know",
)
