-- needs: run, full, server, episode, queue, group, lengths
-- ARGV: episode, fence, payload bytes, bytes it counts for, reward ('' for none), lowest version ('' for none), highest
-- version, response tokens, outcome. KEYS[2…]: the payload's keys, where this server holds them.
local episode, fence, bytes, held, reward = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local lowest, highest, tokens = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local task_id, m = split_episode(episode)
local before = call('HMGET', group_key(task_id), 's' .. m, 'f' .. m)
if before[1] == 'd' and before[2] == fence then return 0 end

local member = owned(episode, fence, now_ms())
if not member then return lease_lost(episode, fence) end
if highest > run.version then
  return refuse('BADPAYLOAD', 'version_spans: version ' .. highest .. ' is newer than ' .. run.version)
end
local stored = 0
for i = 2, #KEYS do stored = stored + call('STRLEN', KEYS[i]) end
if #KEYS > 1 and stored < bytes then
  return refuse('RETRY', episode .. ': ' .. stored .. ' of ' .. bytes .. ' payload bytes are stored')
end
unhold(episode, member.split, member.worker)
call('DEL', key('journal:' .. episode))
call('HDEL', member.group, 'n' .. m)
add_split_bytes(member.split, held - member.journal_bytes)
call('HSET', member.group, 's' .. m, 'd', 'b' .. m, bytes, 'h' .. m, held, 't' .. m, tokens)
if lowest then call('HSET', member.group, 'v' .. m, lowest) end
if reward ~= '' then
  call('HSET', member.group, 'r' .. m, 1)
  call('HINCRBY', member.group, 'rewarded', 1)
  local known = call('HMGET', member.group, 'lowest', 'rmin', 'rmax')
  if lowest and (not known[1] or lowest < tonumber(known[1])) then call('HSET', member.group, 'lowest', lowest) end
  if not known[2] or tonumber(reward) < tonumber(known[2]) then call('HSET', member.group, 'rmin', reward) end
  if not known[3] or tonumber(reward) > tonumber(known[3]) then call('HSET', member.group, 'rmax', reward) end
else
  call('HSET', member.group, 'o' .. m, ARGV[9])
end
if member.split == 'train' then
  count('completed', 1)
  count_length(tokens, false)
end
count_split(member.split, 'done', 1)
member_ended(member)
return 1
