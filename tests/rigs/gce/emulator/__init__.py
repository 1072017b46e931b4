"""Google's APIs at the wire, for one project, on one machine: state, bill, permissions, faults."""
