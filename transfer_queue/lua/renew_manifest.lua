-- needs: run, trainer
-- ARGV: version, packed announcement. Returns 1 if `version` is the current one.
if tonumber(ARGV[1]) ~= run.version then return 0 end
call('HSET', STEPS, 'announcement', ARGV[2])
return 1
