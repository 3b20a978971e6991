-- needs: run, trainer, server, episode, steps
-- ARGV: version, packed announcement, nonce. Returns 1 if it became current, 0 if it was published before.
local version, nonce = tonumber(ARGV[1]), ARGV[3]
if version <= run.version then
  return call('HGET', STEPS, 'published_by') == nonce and 1 or 0
end
if version ~= run.version + 1 or version > run.next_step then
  return refuse('STEP', 'version ' .. version .. ' after ' .. run.version .. ': step ' .. (version - 1)
    .. ' is out of order or was never leased')
end
count_trained(step_groups(version - 1))
call('HSET', STEPS, 'version', version, 'announcement', ARGV[2], 'published_by', nonce)
return 1
