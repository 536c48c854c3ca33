"""What every replica must hold and do: ledger, fleet, publication, pause. Pure, with one driver."""
