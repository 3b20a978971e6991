#!/bin/bash
cat > top.pl <<'END'
open(my $log, "<", "/app/access.log") or die $!;
my %count;
while (<$log>) { my ($address) = split; $count{$address}++ }
print((sort { $count{$b} <=> $count{$a} } keys %count)[0], "\n");
END
