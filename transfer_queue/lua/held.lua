-- needs: run, episode, group
-- Finished training episodes that are still here: in unfinished and ready groups, and in steps not yet committed.
local names = {}
for _, set in ipairs({'admitted', 'ready'}) do
  for _, task_id in ipairs(call('ZRANGE', key(set), 0, -1)) do
    local v = fields_of(group_key(task_id))
    for m = 0, tonumber(v.size) - 1 do
      if v['s' .. m] == 'd' then names[#names + 1] = task_id .. '#' .. m end
    end
  end
end
for _, packed in ipairs(call('HVALS', key('steps'))) do
  for _, group in ipairs(cmsgpack.unpack(packed)) do
    for _, episode in ipairs(group) do names[#names + 1] = episode end
  end
end
return names
